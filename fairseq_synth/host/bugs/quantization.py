"""Repairs ``--quant-noise-scalar`` without a GPU."""

from typing import Any

import fairseq.modules.quantization.scalar.ops as scalar_ops
from torch import Tensor

from ..repairs import repair


@repair(
    "emulate_int8_histogram",
    scalar_ops,
    symptom='`--quant-noise-scalar` ends in "Torch not compiled with CUDA enabled" on a CPU',
    versions="all versions",
)
def quantize_without_a_gpu(
    original_emulate_int8_histogram: Any,
    w: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    bits: int = 8,
) -> Any:
    """Replaces ``emulate_int8_histogram`` with one that computes the scale on the device of the weights.

    The original moves the scale to the GPU, wherever the weights are. With the repair, a model that was trained with
    ``--quant-noise-scalar`` can also translate on a CPU.
    """
    if scale is None:
        observer = scalar_ops.quantization.observer.HistogramObserver().to(w.device)
        observer(w.float())
        new_scale, new_zero_point = observer.calculate_qparams()
        scale = new_scale.to(w)  # to its device and type
        zero_point = new_zero_point.to(w)
    return original_emulate_int8_histogram(w, scale=scale, zero_point=zero_point, bits=bits)
