"""Small questions and conversions about tensors that every part of the attention needs."""

import torch
from torch import Tensor


def is_recorded() -> bool:
    """Returns whether torch records the computation at the moment, for `torch.jit.trace` or `torch.compile`."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def on_cpu(x: Tensor) -> bool:
    """Returns whether `x` is on a CPU and the computation is not recorded, so that Python may branch on its values.

    On a GPU, reading a value makes the CPU wait. A recording has only the branch that was taken for the example input.
    """
    return x.device.type == "cpu" and not is_recorded()


def in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` in the given type, like `Tensor.to`, but several times as fast if it has the type already."""
    if x.dtype == dtype:
        return x
    return x.to(dtype)


def at_least_fp32(x: Tensor) -> Tensor:
    """Returns `x` in fp32, or as it is if it is in fp64."""
    if x.dtype == torch.float64:
        return x
    return in_type(x, torch.float32)


def lowest(dtype: torch.dtype) -> float:
    """Returns a number near the lowest finite number of a floating-point type; for fp64, near that of fp32."""
    return -65504.0 if dtype == torch.float16 else -3.3e38
