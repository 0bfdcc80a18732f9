"""Repairs ``--quant-noise-scalar`` without a GPU."""

from collections.abc import Callable
from typing import Any

import fairseq.modules.quantization.scalar.ops as scalar_ops
from torch import Tensor

from ..repairs import repair


@repair(
    "emulate_int8_histogram",
    scalar_ops,
    symptom='`--quant-noise-scalar` on a CPU fails with "Torch not compiled with CUDA enabled"',
    versions="all versions",
)
def quantize_without_a_gpu(
    original: Callable[..., Any],
    w: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    bits: int = 8,
) -> Any:
    """Replaces fairseq's ``emulate_int8_histogram`` (``original``): works without a GPU if the weights are on the CPU.

    The function rounds weights as a quantization to integers would. If it gets no scale, fairseq computes one on the
    GPU, wherever the weights are. The replacement computes it on the device of the weights, and passes it to the
    original. So a model that was trained with ``--quant-noise-scalar`` can also translate on a CPU.

    Args:
        original: fairseq's function.
        w: the weights.
        scale: the distance between two rounded values; None to compute `scale` and `zero_point` from the weights.
        zero_point: the integer that stands for 0.
        bits: the number of bits of the integers.

    Returns:
        What the original returns: the rounded weights, `scale` and `zero_point`.
    """
    if scale is None:
        scale, zero_point = compute_scale(w)
    return original(w, scale=scale, zero_point=zero_point, bits=bits)


def compute_scale(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scale and the zero point that suit the weights best, on their device and with their type."""
    # The observer of torch sees all weights, and then computes the best scale for them.
    observer = scalar_ops.quantization.observer.HistogramObserver().to(weights.device)
    observer(weights.float())
    scale, zero_point = observer.calculate_qparams()
    return scale.to(weights), zero_point.to(weights)
