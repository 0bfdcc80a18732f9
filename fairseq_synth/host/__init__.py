"""Everything the plugin does to fairseq itself, apart from registering its models: `repair_fairseq`.

`versions` checks that fairseq and torch fit. The repairs of fairseq's bugs are in `messages`, `flags`, `data`,
`checkpoints`, `training`, `search` and `layers`; `repairs` lists and applies them. `layers` has the encoder layer to
build on, too.
"""


def repair_fairseq() -> None:
    """Applies every repair that is not switched off. Raises SynthesizerError if fairseq or torch does not fit, or the
    switch names no repair."""
    import torch

    from . import messages, versions  # noqa: F401
    from .repairs import apply_repairs, check_switch, replace

    apply_repairs()  # so far that of `messages`: what fails from here on is one line
    versions.check_torch(torch.__version__)
    versions.import_host()

    import fairseq.checkpoint_utils

    from . import checkpoints, data, flags, layers, search, training  # noqa: F401  (they import fairseq)

    check_switch()
    # not a repair to be switched off: without it a checkpoint can run code
    replace(fairseq.checkpoint_utils, "load_checkpoint_to_cpu", checkpoints.load_weights_only)
    apply_repairs()
