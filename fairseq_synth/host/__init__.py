"""Everything that the plugin changes in fairseq, apart from registering its models.

The function `repair_fairseq` makes all changes. They are of three kinds:

- ``needed/``: repairs without which the plugin does not run, or computes wrong results;
- ``bugs/``: repairs of bugs that every user of fairseq can meet;
- ``messages/``: one line in place of a traceback, for mistakes that fairseq does not explain.

`repairs` registers and applies them, and `parsed_flags` registers those that check or change the flags of a command
line. `message_table` explains errors of fairseq and torch. `versions` checks that fairseq and torch can be used.
`layers` has the encoder layer that the plugin builds on.
"""


def repair_fairseq() -> None:
    """Changes fairseq by every repair that is not switched off by the variable FAIRSEQ_SYNTH_NO_REPAIRS.

    A repair is registered when the module that has it is imported, and applied by `apply_repairs`. The order matters:

    1. The repair of `message_table` is registered and applied, which needs no fairseq. Every later error, including
       those of steps 2 and 4, is printed as one line.
    2. The versions of torch and fairseq are checked.
    3. The other repairs are registered. Their modules import fairseq, which the check has found usable.
    4. The variable is checked, now that all repairs are known by name.
    5. The other repairs are applied.

    Raises SynthesizerError if this fairseq or torch cannot be used, or if the variable names an unknown repair.
    """
    import torch

    from . import message_table, versions  # noqa: F401  (the import of the table registers its repair)
    from .repairs import Place, apply_repairs, check_switch, replace

    apply_repairs()  # so far only the excepthook, the function of Python that prints errors
    versions.check_torch(torch.__version__)
    versions.import_host()

    import fairseq.checkpoint_utils

    # These imports register the other repairs.
    from . import bugs, messages, needed  # noqa: F401
    from .needed.loading import load_weights_only

    check_switch()
    # Not a repair that can be switched off: without it, loading a checkpoint can run code.
    replace(Place(fairseq.checkpoint_utils, "load_checkpoint_to_cpu"), load_weights_only)
    apply_repairs()  # the repair of step 1, which is applied already, stays as it is
