"""``softmax(S) V`` on a GPU by Triton kernels: neither logits nor weights leave the registers, in either pass.

The kernels are off unless the environment variable FAIRSEQ_SYNTH_KERNELS is 1, as no training with them has run to its
end yet. The first call of each kind is also computed by the definition, and the kernels are switched off if the two
differ.

==================  ==================================================================================
this file           which calls the kernels take, and how they are called
`tensors`           how the kernels read the tensors of a call
`launches`          which kernels a call launches, with which tiles, numbers and memory
`check`             the comparison with the definition
`triton_common`     the formula that the kernels compute, and what they share
`triton_attention`  the kernels
`triton_sums`       the kernel that adds up gradients of what the batch shares
==================  ==================================================================================
"""

import logging
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import SynthesizerError
from ...logits import Logits
from ...masks import is_causal
from ...tensors import is_recorded
from .. import plain
from .check import compare
from .launches import Launch, Plan, find_plan, name_tensors
from .tensors import Call, Summands, align_memory, prepare_call, sort_terms

logger = logging.getLogger(__name__)

# The types for a GPU. In fp32, products without tensor cores take too many registers.
DTYPES = (torch.bfloat16, torch.float16)
# The types for Triton's interpreter, which computes with numpy: numpy has no bf16.
INTERPRETED = (torch.float32, torch.float16)
VARIABLE = "FAIRSEQ_SYNTH_KERNELS"
SWITCH = os.environ.get(VARIABLE, "0")  # read once, because Python takes as long to read it as to launch a kernel
TRITON = (3, 4)  # the oldest release whose kernels take tuples
CAPABILITY = (8, 0)
MAX_HEAD_DIM = 128
MAX_HEAD_DIM_OF_MIXTURES = 64  # the limit for mixtures of three functions or more


class SortedTerms(NamedTuple):
    """The terms of logits, sorted."""

    logits: Logits
    summands: Summands


# The sorted terms of the call that `refuses` has taken last. `compute`, which comes next, need not sort them again.
latest: SortedTerms | None = None


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """Returns why the kernels cannot take a call, or an empty string if they can. Then `compute` has to come next.

    The arguments are those of `computations.attend`, as for every computation. The padding mask and dropout do not
    matter here. If the kernels are switched on, each reason is logged once.

    Raises:
        SynthesizerError: The environment variable is neither 1 nor 0.
    """
    if not are_on():
        return "they are switched off"
    reason = refuse_tensors(value, attn_mask)
    if reason:
        log_refusal(reason)
        return reason
    summands = sort_terms(logits, value)
    reason = refuse_summands(summands, value)
    if reason:
        log_refusal(reason)
        return reason
    # `compute` takes the sorted terms. Those of a refused call must not be kept: nothing would take them, and their
    # tensors would stay in memory.
    keep_summands(logits, summands)
    return ""


def are_on() -> bool:
    """Returns whether the kernels are switched on.

    Raises:
        SynthesizerError: The environment variable is neither 1 nor 0.
    """
    if SWITCH not in ("", "0", "1"):
        raise SynthesizerError(f"{VARIABLE}={SWITCH}: use 1 for on or 0 for off")
    return SWITCH == "1"


def refuse_tensors(value: Tensor, attn_mask: Tensor | None) -> str:
    """Returns why the kernels cannot take the values or the mask of a call, or an empty string if they can."""
    if is_recorded() or type(value) is not Tensor:
        return "torch records the call"
    if value.numel() == 0:
        return "the batch is empty"
    if not device_fits(value.device, value.dtype):
        return f"the kernels do not run on {value.device} in {name_of_type(value.dtype)}"
    if attn_mask is not None and not is_causal(attn_mask):
        return "the attention mask is not the causal one"
    return ""


def refuse_summands(summands: Summands, value: Tensor) -> str:
    """Returns why the kernels cannot take the logits of a call, or an empty string if they can."""
    reason = summands.reason_to_refuse()
    if reason:
        return reason
    # A kernel holds a tile of each summand in registers. The more summands there are, the narrower heads have to be.
    limit = MAX_HEAD_DIM if summands.number_of_tiles() <= 2 else MAX_HEAD_DIM_OF_MIXTURES
    if max(value.size(3), summands.widest_factor()) > limit:
        return f"heads are wider than {limit}"
    return ""


def keep_summands(logits: Logits, summands: Summands) -> None:
    """Keeps the sorted terms of logits for `take_summands`."""
    global latest
    latest = SortedTerms(logits, summands)


def take_summands(logits: Logits, value: Tensor) -> Summands:
    """Returns the sorted terms of logits: those that `keep_summands` has kept, if they are of the same logits.

    The kept terms are forgotten, because they would keep the tensors of the call in memory.
    """
    global latest
    kept = latest
    latest = None
    if kept is not None and kept.logits is logits:
        return kept.summands
    return sort_terms(logits, value)


@cache
def log_refusal(reason: str) -> None:
    """Logs, once for each reason, that a call is computed without the kernels."""
    logger.info(f"{VARIABLE}: some attention is computed without the kernels: {reason}")


@cache
def device_fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernels run on a device in a type. If they do not, a warning says why.

    `cache` makes this one warning for each device and type.
    """
    if not is_suitable_device(device):
        major, minor = CAPABILITY
        needs = f"an NVIDIA GPU of compute capability {major}.{minor} or higher, and Triton"
        logger.warning(f"{VARIABLE}: has no effect on {device}: the kernels need {needs}")
        return False
    suitable_types = INTERPRETED if device.type == "cpu" else DTYPES
    if dtype not in suitable_types:
        logger.warning(f"{VARIABLE}: has no effect in {name_of_type(dtype)}: use --fp16, --bf16 or --amp")
        return False
    return True


def is_suitable_device(device: torch.device) -> bool:
    """Returns whether a device is a GPU for which the kernels are made, or the CPU with Triton's interpreter."""
    if device.type == "cpu":
        return is_interpreted() and triton_fits()
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= CAPABILITY and triton_fits()


def name_of_type(dtype: torch.dtype) -> str:
    """Returns the name of a type, such as float16."""
    return str(dtype).removeprefix("torch.")


def is_interpreted() -> bool:
    """Returns whether Triton's interpreter takes the place of a GPU, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_fits() -> bool:
    """Returns whether Triton is installed and new enough."""
    try:
        import triton
    except ImportError:
        return False
    return tuple(int(number) for number in triton.__version__.split(".")[:2]) >= TRITON


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Returns ``softmax(S) V``, (T B, C); see `computations`. Rows of padding behind a sentence are 0.

    If the kernels turn out to be wrong in the first call of a kind, the result is that of `plain`.
    """
    summands = take_summands(logits, value)
    call = prepare_call(logits, value, key_padding_mask, attn_mask, dropout, summands)
    plan = find_plan(call.layout)
    if not plan.is_loaded:
        are_usable = load(plan, call)
        if not are_usable:
            return plain.compute(logits, value, key_padding_mask, attn_mask, dropout)
    seed = None
    if dropout > 0:
        seed = torch.randint(1 << 62, (1,), device=value.device)
    return attend(plan, call, seed)


def attend(plan: Plan, call: Call, seed: Tensor | None) -> Tensor:
    """Returns the result (T B, C) of the kernels of a plan for a call.

    Args:
        plan: The launches.
        call: The call.
        seed: The seed of the dropped weights, (1,), which a layout with dropout needs; else None.
    """
    hidden = None
    if call.key_padding_mask is not None:
        # The kernels take bytes, not booleans, and rely on their alignment.
        (hidden,) = align_memory([call.key_padding_mask.to(torch.bool).contiguous().view(torch.uint8)])
    out: Tensor = KernelAttention.apply(plan, hidden, seed, *call.tensors)
    return out


def attend_without_dropping(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> Tensor:
    """Returns the result (T B, C) of the kernels that `compute` would launch, but with a dropout probability of 0.

    A kernel with dropout is compiled once for all probabilities. At a probability of 0 it keeps every weight, so that
    its result can be compared with the definition's. It still reads a seed, whose value then has no effect. No random
    number is drawn, so the random numbers of the program stay as they are.
    """
    summands = sort_terms(logits, value)
    call = prepare_call(logits, value, key_padding_mask, attn_mask, dropout, summands)
    # `has_dropout` decides whether a kernel is compiled with dropout, and stays as it is. The probability `dropout` is
    # only passed to the kernel as an argument.
    plan = find_plan(call.layout._replace(dropout=0.0))
    if not is_interpreted():
        compile_kernels(plan, call)
    seed = None
    if call.layout.has_dropout:
        seed = torch.zeros(1, dtype=torch.int64, device=value.device)
    return attend(plan, call, seed)


CHECKED: set[Any] = set()  # kinds of calls whose results were those of the definition


def load(plan: Plan, call: Call) -> bool:
    """Compiles the kernels of a plan, and compares them with the definition if they are the first of their kind.

    Returns:
        whether the kernels may be used for this call. If so, `plan.is_loaded` is set. If their results differ from the
        definition's, the kernels are switched off for the rest of the process, with a warning. If the definition's own
        results are not finite, the comparison says nothing. Then the kernels are not used for this call, and the next
        call is compared.

    Raises:
        SynthesizerError: A kernel does not compile, or does not fit this GPU.
    """
    if not is_interpreted():
        compile_kernels(plan, call)
    kind = call.layout.kind()
    if kind not in CHECKED:
        comparison = compare(call, attend_without_dropping)
        if comparison.difference:
            switch_off(comparison.difference)
            return False
        if not comparison.is_finite:
            return False  # undecided: `is_loaded` stays false, so that the next call comes here again
        CHECKED.add(kind)
    plan.is_loaded = True
    return True


def switch_off(difference: str) -> None:
    """Switches the kernels off for the rest of the process, and warns.

    If activations are checkpointed, layers whose first pass was by the kernels are computed again without them. In this
    one update their dropout then differs between the two passes.
    """
    global SWITCH
    SWITCH = "0"
    logger.warning(f"{VARIABLE}: the kernels are switched off, because they are wrong on this machine: {difference}")


def compile_kernels(plan: Plan, call: Call) -> None:
    """Compiles the kernels of a plan and loads them on the GPU, unless they are compiled already.

    Those of the backward pass are compiled now, too. When it runs, it would be too late to compute the call in another
    way.

    Raises:
        SynthesizerError: A kernel does not compile, or does not fit this GPU.
    """
    if plan.is_compiled:
        return
    tensors = make_stand_ins(plan, call)
    try:
        with torch.cuda.device_of(call.value):
            for launch in [plan.forward, *plan.backward]:
                launch.compile(launch.args(tensors))
    except torch.cuda.OutOfMemoryError:
        raise  # fairseq leaves such a batch out
    except Exception as error:  # the compiler, the assembler and the GPU's driver raise many classes of errors
        raise SynthesizerError(f"set {VARIABLE}=0: a kernel failed: {error!r:.1000}") from error
    plan.is_compiled = True


def make_stand_ins(plan: Plan, call: Call) -> dict[Any, Any]:
    """Returns {name: tensor} with a tensor of the right type for each tensor that the launches of a plan use.

    A kernel is compiled for the types of its tensors, whose sizes and values do not matter. So no tensor of the right
    size is allocated: any tensor of the same type stands for it.
    """
    # "packed" comes first among the tensors of a call. It has the type of the values, and so have output and gradient.
    in_type_of_values = call.tensors[0]
    in_fp32 = in_type_of_values.new_empty(1, dtype=torch.float32)
    tensors = name_tensors(
        hidden=in_type_of_values.new_empty(1, dtype=torch.uint8),
        seed=in_type_of_values.new_empty(1, dtype=torch.int64),
        out=in_type_of_values,
        lse=in_fp32,
        grad=in_type_of_values,
    )
    tensors.update(zip(plan.names, call.tensors))
    tensors.update(zip(plan.gradient_names, call.tensors))  # a gradient has the type of its tensor
    tensors.update(dict.fromkeys(plan.sums, in_fp32))
    return tensors


def run(launch: Launch, tensors: dict[Any, Any]) -> None:
    """Launches a kernel. `tensors`: what `name_tensors` returns, with all tensors of the launch."""
    arguments = launch.args(tensors)
    if launch.compiled is not None:
        # ``launch.kernel[launch.grid]`` would do, but Triton takes much longer to find the compiled kernel than to
        # launch it.
        launch.compiled(*arguments)
    else:
        launch.kernel[launch.grid](*arguments)  # Triton's interpreter, for which nothing is compiled


class KernelAttention(torch.autograd.Function):
    """Launches the kernels of a plan.

    It saves its inputs. For long sentences it also saves its output, and the logarithm of the softmax's denominator for
    each row (``lse``, short for log-sum-exp), which the backward pass reads. The backward pass for short sentences
    computes both again, because a single program has the whole sentence.

    Both passes run for every attention of every training step. To save time they call as few functions as possible.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, hidden: Tensor | None, seed: Tensor | None, *inputs: Tensor) -> Tensor:
        """Returns the result of the kernels, (T B, C).

        Args:
            ctx: What the backward pass needs is saved here.
            plan: The launches.
            hidden: (B, T), not 0 at padding, or None.
            seed: The seed of the dropped weights, (1,), or None without dropout.
            inputs: The tensors of the call, in the order of `plan.names`.
        """
        layout = plan.layout
        out = inputs[0].new_empty((layout.length * layout.bsz, layout.num_heads * layout.value_width))
        lse = None  # the kernel for short sentences writes none
        if plan.is_long:
            lse = out.new_empty((layout.bsz, layout.num_heads, layout.length), dtype=torch.float32)
        tensors = name_tensors(hidden=hidden, seed=seed, out=out, lse=lse)
        tensors.update(zip(plan.names, inputs))
        with torch.cuda.device_of(out):  # the current device may be another; in the backward pass torch sets it
            run(plan.forward, tensors)
        ctx.plan = plan
        if plan.is_long:
            ctx.save_for_backward(hidden, seed, lse, out, *inputs)
        else:
            ctx.save_for_backward(hidden, seed, None, None, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of all arguments of `forward`, which are None for the first three.

        Args:
            ctx: What `forward` has saved.
            grad: The gradient of the output, (T B, C).
        """
        plan: Plan = ctx.plan
        # Tensors in the order in which `forward` has saved them. A hook on saved tensors, such as torch's
        # `save_on_cpu`, may bring them back to an address that is not aligned.
        hidden, seed, lse, out, *inputs, grad = align_memory([*ctx.saved_tensors, grad.contiguous()])
        tensors = name_tensors(hidden=hidden, seed=seed, out=out, lse=lse, grad=grad)

        # 1. The inputs, and for each of them the gradient that the kernels write; None if it is not wanted.
        gradients: list[Tensor | None] = []
        for name, gradient_name, tensor in zip(plan.names, plan.gradient_names, inputs):
            gradient = torch.empty_like(tensor) if name in plan.layout.wanted else None
            tensors[name] = tensor
            tensors[gradient_name] = gradient
            gradients.append(gradient)
        if plan.has_unused_factors:
            tensors["to_pair"].zero_()  # the gradient of "pair"; the kernels write all of it but the unused factors

        # 2. Memory for partial sums: a single allocation, which is divided. The kernels rely on the sums being side by
        # side (`Plan.reserve_sums`). `split` would be much slower than `split_with_sizes`.
        if plan.sums:
            sizes = list(plan.sums.values())
            memory = grad.new_empty(sum(sizes), dtype=torch.float32)
            tensors.update(zip(plan.sums, memory.split_with_sizes(sizes)))

        # 3. The kernels.
        for launch in plan.backward:
            run(launch, tensors)
        return (None, None, None, *gradients)
