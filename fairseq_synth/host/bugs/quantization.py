"""Repairs ``--quant-noise-scalar`` without a GPU."""

from typing import Any

import fairseq.modules.quantization.scalar.ops as scalar_ops
from torch import Tensor

from ..repairs import repair


@repair("emulate_int8_histogram", scalar_ops)
def quantize_without_a_gpu(
    emulate: Any, w: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, bits: int = 8
) -> Any:
    """``--quant-noise-scalar`` ends in "Torch not compiled with CUDA enabled" on a CPU (all versions).

    fairseq moves the scale of the quantization to the GPU, wherever the weights are. The repair computes it where they
    are. A model that was trained with the flag can then also translate on a CPU.
    """
    if scale is None:
        observer = scalar_ops.quantization.observer.HistogramObserver().to(w.device)
        observer(w.float())
        new_scale, new_zero_point = observer.calculate_qparams()
        scale = new_scale.to(w)  # to its device and type
        zero_point = new_zero_point.to(w)
    return emulate(w, scale=scale, zero_point=zero_point, bits=bits)
