"""Repairs of bugs that every user of fairseq can meet, with or without a Synthesizer."""

from . import (  # noqa: F401  (each import registers its repairs)
    averages,
    batches,
    checkpoints,
    command_line,
    early_stopping,
    fusion,
    hub,
    quantization,
    search,
    training,
)
