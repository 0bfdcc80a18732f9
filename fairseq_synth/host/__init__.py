"""Everything that the plugin changes in fairseq, apart from registering its models: `repair_fairseq`.

The changes are of three kinds:

- ``needed/``: repairs without which the plugin does not run, or computes wrong results;
- ``bugs/``: repairs of bugs that every user of fairseq can meet;
- ``messages/``: one line in place of a traceback, for mistakes that fairseq does not explain.

`repairs` registers and applies them; `versions` checks that fairseq and torch fit; `layers` has the encoder layer that
the plugin builds on.
"""


def repair_fairseq() -> None:
    """Applies every repair that is not switched off.

    Raises SynthesizerError if fairseq or torch does not fit, or if the switch names a repair that does not exist.
    """
    import torch

    from . import message_table, versions  # noqa: F401  (the import of the table registers its repair)
    from .repairs import Place, apply_repairs, check_switch, replace

    apply_repairs()  # so far only the excepthook: every error from here on is printed as one line
    versions.check_torch(torch.__version__)
    versions.import_host()

    import fairseq.checkpoint_utils

    # These imports register the other repairs. They import fairseq, so they come after its check.
    from . import bugs, messages, needed  # noqa: F401
    from .needed.loading import load_weights_only

    check_switch()
    # Not a repair that can be switched off: without it, loading a checkpoint can run code.
    replace(Place(fairseq.checkpoint_utils, "load_checkpoint_to_cpu"), load_weights_only)
    apply_repairs()
