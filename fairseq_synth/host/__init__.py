"""Everything that the plugin changes in fairseq, apart from registering its models.

The function `repair_fairseq` makes all changes. They are of three kinds:

- ``needed/``: repairs without which the plugin does not run, or computes wrong results;
- ``bugs/``: repairs of bugs that every user of fairseq can meet;
- ``messages/``: one line in place of a traceback, for mistakes that fairseq does not explain.

`repairs` registers and applies them, and `parsed_flags` registers those that check or change the flags of a command
line. `message_table` explains errors of fairseq and torch. `versions` checks that fairseq and torch can be used.
`layers` has the encoder layer that the plugin builds on.
"""

from .repairs import Place, apply_repairs, check_switch, replace


def repair_fairseq() -> None:
    """Changes fairseq by every repair that is not switched off by the variable FAIRSEQ_SYNTH_NO_REPAIRS.

    A repair is registered when the module that has it is imported, and `apply_repairs` applies what is registered.
    Most of these modules import fairseq, so they can be imported only after fairseq was checked.

    Raises SynthesizerError if this fairseq or torch cannot be used, or if the variable names an unknown repair.
    """
    register_error_printing()
    apply_repairs()  # From now on, an error is printed as one line. This includes the errors of the next steps.
    check_versions()
    register_other_repairs()
    check_switch()  # only now, because the check needs the names of all repairs
    load_checkpoints_safely()
    apply_repairs()  # This applies the other repairs. A repair that was applied before is not applied again.


def register_error_printing() -> None:
    """Registers the repair that prints errors as one line, by importing its module, which does not need fairseq."""
    from . import message_table  # noqa: F401


def check_versions() -> None:
    """Checks the installed torch and fairseq; raises SynthesizerError if one of them cannot be used."""
    import torch

    from . import versions

    versions.check_torch(torch.__version__)
    versions.import_host()


def register_other_repairs() -> None:
    """Registers all repairs that need fairseq, by importing their modules."""
    from . import bugs, messages, needed  # noqa: F401


def load_checkpoints_safely() -> None:
    """Replaces fairseq's function that loads a checkpoint, so that loading never runs code that the file contains.

    This is no repair, because users must not switch it off.
    """
    import fairseq.checkpoint_utils

    from .needed.loading import load_weights_only

    replace(Place(fairseq.checkpoint_utils, "load_checkpoint_to_cpu"), load_weights_only)
