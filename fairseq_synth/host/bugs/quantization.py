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

    The function rounds weights as a quantization to integers would. fairseq computes the scale on the GPU, wherever the
    weights are. The replacement computes it on the device of the weights, and passes it to the original. So a model
    that was trained with ``--quant-noise-scalar`` can also translate on a CPU.

    Args:
        original: fairseq's function.
        w: the weights.
        scale: the distance between two rounded values; None to compute it from the weights.
        zero_point: the integer that stands for 0. It is given together with `scale`, or computed together with it.
        bits: the number of bits of the integers.

    Returns:
        What the original returns: the rounded weights, `scale` and `zero_point`.
    """
    if scale is None:
        # The observer of torch sees all weights, and then computes the best scale for them.
        observer = scalar_ops.quantization.observer.HistogramObserver().to(w.device)
        observer(w.float())
        scale, zero_point = observer.calculate_qparams()
        scale = scale.to(device=w.device, dtype=w.dtype)
        zero_point = zero_point.to(device=w.device, dtype=w.dtype)
    return original(w, scale=scale, zero_point=zero_point, bits=bits)
