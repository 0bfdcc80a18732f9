"""Checks the weights of a checkpoint before a command computes with them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .errors import SynthesizerError


def check_weights(checkpoint: Path | str, weights: Mapping[str, Tensor]) -> None:
    """Checks that no weight of a checkpoint is NaN or infinite, as after a training that has diverged.

    Args:
        checkpoint: the file's path, for the message.
        weights: the model's state dict.

    Raises:
        SynthesizerError: a weight is NaN or infinite; the message names the checkpoint and the weight.
    """
    for name, weight in weights.items():
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all()):
            raise SynthesizerError(
                f"{checkpoint}: its weight {name} has values that are not numbers (NaN or infinity), so the training "
                "has diverged; give an earlier checkpoint, or train again with a lower learning rate"
            )
