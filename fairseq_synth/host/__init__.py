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

    Raises SynthesizerError if this fairseq or torch cannot be used, or if the variable names an unknown repair.
    """
    apply_error_printing()  # This comes first, so that the errors of the next two steps are printed as one line, too.
    check_versions()
    apply_other_repairs()


def apply_error_printing() -> None:
    """Applies the repair that prints errors as one line. It does not need fairseq."""
    from . import message_table  # noqa: F401  (the import registers the repair)

    apply_repairs()


def check_versions() -> None:
    """Checks the installed torch and fairseq; raises SynthesizerError if one of them cannot be used."""
    import torch

    from . import versions

    versions.check_torch(torch.__version__)
    versions.import_host()


def apply_other_repairs() -> None:
    """Applies all repairs that need fairseq. Raises SynthesizerError if FAIRSEQ_SYNTH_NO_REPAIRS names an unknown one.

    `apply_repairs` applies the repairs that are registered, and skips those that are applied already.
    """
    from . import bugs, messages, needed  # noqa: F401  (the imports register the repairs)

    check_switch()  # It needs the names of all repairs, so they have to be registered.
    load_checkpoints_safely()
    apply_repairs()


def load_checkpoints_safely() -> None:
    """Replaces fairseq's function that loads a checkpoint, so that loading never runs code that the file contains.

    This is no repair, because users must not switch it off.
    """
    import fairseq.checkpoint_utils

    from .needed.loading import load_weights_only

    replace(Place(fairseq.checkpoint_utils, "load_checkpoint_to_cpu"), load_weights_only)
