"""``softmax(S) V`` on a GPU by Triton kernels: neither logits nor weights leave the registers, in either pass.

The kernels are off unless the environment variable FAIRSEQ_SYNTH_KERNELS is 1, as no training with them has run to its
end yet. The first call of each kind is also computed by the definition, and the kernels are switched off if the two
differ.

==================  ==================================================================================
this file           which calls the kernels take, and how they are called
`arguments`         the arguments of the kernels, and the names of tensors and summands
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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import SynthesizerError
from ...logits import Logits
from ...masks import is_causal
from ...tensors import is_recorded
from .. import plain
from .arguments import CallTensors, PartialSums, PassTensors
from .check import compare
from .launches import Kind, Launch, Plan, find_plan
from .tensors import Call, Summands, align_memory, copy_unless_aligned, find_summands, prepare_call

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
LARGEST_SEED = 1 << 62  # a seed has 64 bits, with a sign


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """Returns why the kernels cannot take a call, or an empty string if they can.

    The arguments are those of `computations.attend`, as for every computation. The padding mask and dropout do not
    matter here. If the kernels are switched on, each reason is logged once.

    Raises:
        SynthesizerError: The environment variable FAIRSEQ_SYNTH_KERNELS is neither 1 nor 0.
    """
    if not are_on():
        return "they are switched off"
    reason = refuse_tensors(value, attn_mask)
    if not reason:
        reason = refuse_summands(find_summands(logits, value), value)
    if reason:
        log_refusal(reason)
    return reason


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
    """Returns why the kernels cannot take the logits of a call, or an empty string if they can.

    The width of heads is limited, because a program of a kernel holds everything in registers. The limit is lower for
    three terms or more, as each needs a tile (rows, columns) of its own. A bias with a single row needs no tile.
    """
    reason = summands.reason_to_refuse()
    if reason:
        return reason
    products = [*summands.product, *summands.dense]
    num_terms_with_tiles = len(products) + len(summands.outer) + len(summands.matrix)
    max_width = MAX_HEAD_DIM
    if num_terms_with_tiles > 2:
        max_width = MAX_HEAD_DIM_OF_MIXTURES
    # The width of a head is that of its values, and of its queries and keys.
    widths = [value.shape[3]]
    for product in products:
        widths.append(product.query.shape[3])
    if max(widths) > max_width:
        return f"heads are wider than {max_width}"
    return ""


@cache
def log_refusal(reason: str) -> None:
    """Logs, once for each reason, that a call is computed without the kernels."""
    logger.info(f"{VARIABLE}: some attention is computed without the kernels: {reason}")


@cache
def device_fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernels run on a device with tensors of a type. If they do not, a warning says why.

    The results are cached, so that there is one warning for each device and type.
    """
    if not is_suitable_device(device):
        major, minor = CAPABILITY
        needs = f"an NVIDIA GPU of compute capability {major}.{minor} or higher, and Triton"
        logger.warning(f"{VARIABLE}: has no effect on {device}: the kernels need {needs}")
        return False
    if device.type == "cpu":
        suitable_types = INTERPRETED  # Triton's interpreter runs the kernels
    else:
        suitable_types = DTYPES
    if dtype not in suitable_types:
        logger.warning(f"{VARIABLE}: has no effect in {name_of_type(dtype)}: use --fp16, --bf16 or --amp")
        return False
    return True


def is_suitable_device(device: torch.device) -> bool:
    """Returns whether a device is a GPU for which the kernels are made, or the CPU with Triton's interpreter."""
    if device.type == "cpu":
        return is_interpreted() and triton_fits()
    is_nvidia = device.type == "cuda" and torch.version.hip is None  # torch calls AMD's GPUs cuda, too
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
    release = tuple(int(number) for number in triton.__version__.split(".")[:2])  # (3, 4) for 3.4.0
    return release >= TRITON


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Returns ``softmax(S) V``, (T B, C); see `computations`. Rows of padding behind a sentence are 0.

    If the kernels turn out to be wrong when they are used for the first time, `plain` computes the result.
    """
    call = prepare_call(logits, value, key_padding_mask, attn_mask, dropout)
    plan = find_plan(call.layout)  # the launches of kernels, which all calls of the same sizes and types share
    if not plan.is_loaded:
        # This is the first call of the plan. If the kernels compile and are right, `load` sets `is_loaded`.
        are_usable = load(plan, call)
        if not are_usable:
            return plain.compute(logits, value, key_padding_mask, attn_mask, dropout)
    seed = None
    if dropout > 0:
        seed = torch.randint(LARGEST_SEED, (1,), device=value.device)
    # Autograd does not look for tensors inside a record, so that each tensor is an argument of its own.
    out: Tensor = KernelAttention.apply(plan, seed, *call.tensors)
    return out


def attend_without_dropping(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> Tensor:
    """Returns the result (T B, C) of the kernels that `compute` would launch, but drops no attention weights.

    So the result can be compared with that of the definition.
    """
    call = prepare_call(logits, value, key_padding_mask, attn_mask, dropout=0.0)
    layout = call.layout
    seed = None
    if dropout > 0:
        # With dropout, other kernels are launched, and these are to be compared. So they are launched here, too, but
        # they drop with a probability of 0. Their seed is not random, because to draw one would change the random
        # numbers of the training.
        layout = layout._replace(has_dropout=True)
        seed = torch.zeros(1, dtype=torch.int64, device=value.device)
    plan = find_plan(layout)
    compile_kernels(plan, call.tensors)
    out: Tensor = KernelAttention.apply(plan, seed, *call.tensors)
    return out


CHECKED: set[Kind] = set()  # the kinds of calls whose results have been compared, and were those of the definition


def load(plan: Plan, call: Call) -> bool:
    """Compiles the kernels of a plan, and compares them with the definition if they are the first of their kind.

    If the comparison is passed, the kind is added to `CHECKED`, and the plan is marked as loaded. If not, neither is
    done. The next call of the kind is then compared again, unless the kernels have been switched off.

    Returns:
        whether the kernels may be used for this call.

    Raises:
        SynthesizerError: A kernel does not compile, or does not fit this GPU.
    """
    compile_kernels(plan, call.tensors)
    kind = call.layout.kind()
    if kind not in CHECKED:
        is_passed = check_kernels(call)
        if not is_passed:
            return False
        CHECKED.add(kind)
    plan.is_loaded = True
    return True


def check_kernels(call: Call) -> bool:
    """Compares the kernels with the definition for a call, and returns whether the call may use the kernels.

    - If the results of the definition are not finite, the comparison shows nothing. The call may not use the kernels,
      but they stay on.
    - If the results differ, the kernels are switched off for the rest of the process, with a warning.
    - If the results are the same, the call may use the kernels.
    """
    comparison = compare(call, attend_without_dropping)
    if not comparison.is_finite:
        return False
    if comparison.difference:
        switch_off(comparison.difference)
        return False
    return True


def switch_off(difference: str) -> None:
    """Switches the kernels off for the rest of the process, and warns.

    With activation checkpointing, the backward pass computes each layer a second time. Layers that the kernels have
    computed before are then computed without them, and drop other weights than before. This affects one update only.
    """
    global SWITCH
    SWITCH = "0"
    logger.warning(f"{VARIABLE}: the kernels are switched off, because they are wrong on this machine: {difference}")


def compile_kernels(plan: Plan, call_tensors: CallTensors) -> None:
    """Compiles the kernels of both passes and loads them on the GPU of the tensors of a call.

    Nothing is done if they are compiled already, or if Triton's interpreter runs them, as in tests.

    Raises:
        SynthesizerError: A kernel does not compile, or does not fit this GPU.
    """
    if plan.is_compiled or is_interpreted():
        return
    stand_ins = make_stand_ins(plan, call_tensors)  # tensors of the right types, as the results do not exist yet
    # The kernels of the backward pass are compiled now, too, so that no error comes in the middle of an update.
    launches_of_both_passes = [plan.launches.forward, *plan.launches.backward]
    try:
        with torch.cuda.device_of(call_tensors.packed):
            for launch in launches_of_both_passes:
                arguments = launch.args(stand_ins)
                launch.compile(arguments)
    except torch.cuda.OutOfMemoryError:
        raise  # this is no fault of the kernels, and fairseq skips the batch
    except Exception as error:  # the compiler, the assembler and the GPU's driver raise many classes of errors
        description = repr(error)[:1000]  # the message of a compiler may be very long
        raise SynthesizerError(f"set {VARIABLE}=0: a kernel failed: {description}") from error
    plan.is_compiled = True


def make_stand_ins(plan: Plan, call_tensors: CallTensors) -> PassTensors:
    """Returns arguments with which the kernels of a plan can be compiled.

    A kernel is compiled for the types of its tensors, whatever their sizes and contents are. So existing tensors stand
    in for the output and the gradients, and nothing large has to be allocated.
    """
    layout = plan.layout
    values = call_tensors.packed  # it has the values, and perhaps queries and keys
    seed = None
    if layout.has_dropout:
        seed = values.new_empty(1, dtype=torch.int64)
    any_fp32_tensor = values.new_empty(1, dtype=torch.float32)
    # A gradient has the type of its tensor. It is None if it is not needed.
    tensors_with_gradient = {name: getattr(call_tensors, name) for name in layout.wanted}
    sums = dict.fromkeys(plan.launches.memory, any_fp32_tensor)  # {name of a partial sum: tensor}
    return PassTensors(
        call_tensors,
        out=values,  # the output and its gradient have the type of the values
        seed=seed,
        lse=any_fp32_tensor,
        out_gradient=values,
        gradients=CallTensors(**tensors_with_gradient),
        sums=PartialSums(**sums),
    )


def run(launch: Launch, tensors: PassTensors) -> None:
    """Launches a kernel, which writes its results into some of the tensors."""
    arguments = launch.args(tensors)
    if launch.compiled is not None:
        # This is faster than ``launch.kernel[launch.grid](*arguments)``, by which Triton would search for the compiled
        # kernel.
        launch.compiled(*arguments)
    else:
        launch.kernel[launch.grid](*arguments)  # Triton's interpreter, for which nothing is compiled


def allocate_gradients(plan: Plan, inputs: CallTensors) -> CallTensors:
    """Returns tensors without contents, for the gradients of the inputs. Inputs that need no gradient have None."""
    gradients: dict[str, Tensor] = {}
    for name in plan.layout.wanted:
        gradients[name] = torch.empty_like(getattr(inputs, name))
    if plan.has_unused_factors:
        gradients["factors"].zero_()  # the kernels do not write the gradient of unused factors, which is 0
    return CallTensors(**gradients)


def allocate_sums(plan: Plan, out_gradient: Tensor) -> PartialSums:
    """Returns memory in fp32 for the partial sums of a backward pass, on the device of the output's gradient."""
    sizes_of_pieces = list(plan.launches.memory.values())
    if not sizes_of_pieces:
        return PartialSums()
    # The pieces have to lie side by side in one allocation: the kernels write across the ends of pieces, as
    # `launches.measure_memory_of_groups` explains.
    memory = out_gradient.new_empty(sum(sizes_of_pieces), dtype=torch.float32)
    pieces = memory.split_with_sizes(sizes_of_pieces)  # `split` would be much slower
    piece_of_name = dict(zip(plan.launches.memory, pieces))
    return PartialSums(**piece_of_name)


class KernelAttention(torch.autograd.Function):
    """Computes the attention as an operation of autograd: the forward and the backward pass launch kernels.

    It is called by ``KernelAttention.apply(plan, seed, *call_tensors)``. Both passes run for every attention of every
    training step. To save time, they call as few functions as possible.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, seed: Tensor | None, *inputs: Tensor | None) -> Tensor:
        """Returns the output of the attention, (T B, C), and saves in `ctx` what `backward` needs.

        Args:
            ctx: Autograd's record of this call.
            plan: The launches.
            seed: The seed of the dropped weights, (1,), or None without dropout.
            inputs: The fields of a `CallTensors`. Each is an argument of its own, because autograd does not look for
                tensors inside a record.
        """
        call_tensors = CallTensors(*inputs)
        layout = plan.layout
        out = call_tensors.packed.new_empty((layout.length * layout.bsz, layout.num_heads * layout.value_width))
        lse = None
        saved_out = None
        if plan.is_long:
            # The backward pass of long sentences reads `out`, and `lse`: for each row, the logarithm of the softmax's
            # denominator. The backward pass of short sentences reads neither. So `out` is not saved for it, and its
            # memory can be freed earlier.
            lse = out.new_empty((layout.bsz, layout.num_heads, layout.length), dtype=torch.float32)
            saved_out = out
        ctx.plan = plan
        ctx.save_for_backward(saved_out, lse, seed, *inputs)  # `compute_gradients` reads them in this order
        # The tensors may be on another GPU than the current one. In the backward pass, torch takes care of this.
        with torch.cuda.device_of(out):
            run(plan.launches.forward, PassTensors(call_tensors, out, seed, lse))  # writes `out` and `lse`
        return out

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns a gradient, or None, for each argument of ``forward(ctx, plan, seed, *inputs)`` but `ctx`.

        Args:
            ctx: Autograd's record of the call, with the tensors that `forward` has saved.
            out_gradient: The gradient of the output, (T B, C).
        """
        is_recorded_by_autograd = torch.is_grad_enabled()  # with ``create_graph=True``, for second derivatives
        if is_recorded_by_autograd:
            return compute_gradients_once(ctx, out_gradient)
        return compute_gradients(ctx, out_gradient)


def compute_gradients(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the result of `KernelAttention.backward`, computed by the kernels.

    The kernels return nothing, but write the gradients into memory that is allocated here.
    """
    plan: Plan = ctx.plan
    # The gradient, and saved tensors after a hook such as torch's `save_on_cpu`, may lie at any address.
    out, lse, seed, *inputs = align_memory(ctx.saved_tensors)  # in the order in which `forward` has saved them
    out_gradient = copy_unless_aligned(out_gradient.contiguous())
    call_tensors = CallTensors(*inputs)
    gradients = allocate_gradients(plan, call_tensors)
    partial_sums = allocate_sums(plan, out_gradient)
    arguments = PassTensors(call_tensors, out, seed, lse, out_gradient, gradients, partial_sums)
    # The order of the launches matters. The first kernels write gradients of tensors that each sentence has for itself,
    # such as its values, and partial sums of all other gradients. The last kernel adds up the partial sums.
    for launch in plan.launches.backward:
        run(launch, arguments)  # writes some of `gradients` and `partial_sums`
    # The arguments of `forward` were the plan, the seed and the inputs, of which `gradients` has the fields.
    gradient_of_plan = None
    gradient_of_seed = None
    return (gradient_of_plan, gradient_of_seed, *gradients)


# This does the same if autograd records the backward pass, as for second derivatives. Autograd cannot see what the
# kernels compute, so that it must raise an error if the gradients are differentiated. All other backward passes leave
# this out, as it takes as long as two launches.
compute_gradients_once = once_differentiable(compute_gradients)
