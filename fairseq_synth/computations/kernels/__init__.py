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
LARGEST_SEED = 1 << 62  # a seed is an integer of 64 bits with a sign


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

    Registers limit the width of heads. A kernel holds a tile (rows, columns) of the logits, and more for each term. So
    the limit is lower for mixtures of three terms or more. A bias that is a single row needs next to nothing.
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
    """Returns whether the kernels run on a device in a type. If they do not, a warning says why.

    The results are cached, so that each warning comes once for each device and type.
    """
    if not is_suitable_device(device):
        major, minor = CAPABILITY
        needs = f"an NVIDIA GPU of compute capability {major}.{minor} or higher, and Triton"
        logger.warning(f"{VARIABLE}: has no effect on {device}: the kernels need {needs}")
        return False
    # On a CPU, Triton's interpreter runs the kernels (`is_suitable_device`).
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

    If the kernels turn out to be wrong when they are used for the first time, the result is that of `plain`.
    """
    call = prepare_call(logits, value, key_padding_mask, attn_mask, dropout)
    plan = find_plan(call.layout)  # which kernels to launch: all calls of the same sizes and types share a plan
    if not plan.is_loaded:
        # The first call of a plan. `load` compiles the kernels and checks them; if they are right, `is_loaded` is set.
        are_usable = load(plan, call)
        if not are_usable:
            return plain.compute(logits, value, key_padding_mask, attn_mask, dropout)
    seed = None
    if dropout > 0:
        seed = torch.randint(LARGEST_SEED, (1,), device=value.device)
    # Each tensor is an argument of its own, because autograd does not look for tensors inside a record.
    out: Tensor = KernelAttention.apply(plan, seed, *call.tensors)
    return out


def attend_without_dropping(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> Tensor:
    """Returns the result (T B, C) of the kernels that `compute` would launch, but without dropping a weight.

    So it can be compared with the definition's result.
    """
    call = prepare_call(logits, value, key_padding_mask, attn_mask, dropout=0.0)
    if dropout == 0:
        layout = call.layout
        seed = None
    else:
        # Kernels with dropout are compiled with other code than kernels without it. So the kernels with dropout are to
        # be compared, but with a probability of 0, which `prepare_call` has written into the layout. Such kernels need
        # a seed. It is not drawn, because that would change the random numbers of the training.
        layout = call.layout._replace(has_dropout=True)
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

    If activations are checkpointed, layers whose first pass was by the kernels are computed again without them. In this
    one update their dropout then differs between the two passes.
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
    # The kernels of the backward pass are compiled here, too, because an error of theirs would come too late there. The
    # output and the gradients do not exist yet, so that other tensors of the same types stand in for them.
    stand_ins = make_stand_ins(plan, call_tensors)
    try:
        with torch.cuda.device_of(call_tensors.packed):
            for launch in [plan.launches.forward, *plan.launches.backward]:
                arguments = launch.args(stand_ins)
                launch.compile(arguments)
    except torch.cuda.OutOfMemoryError:
        raise  # this is no fault of the kernels, and fairseq skips the batch
    except Exception as error:  # the compiler, the assembler and the GPU's driver raise many classes of errors
        description = repr(error)[:1000]  # the message of a compiler may be very long
        raise SynthesizerError(f"set {VARIABLE}=0: a kernel failed: {description}") from error
    plan.is_compiled = True


def make_stand_ins(plan: Plan, call_tensors: CallTensors) -> PassTensors:
    """Returns tensors with which the kernels of a plan can be compiled. They may have other sizes than in a launch.

    A kernel is compiled for the types of its tensors. So the tensors of the call take the place of results that do not
    exist yet, such as the output and the gradients, and nothing large has to be allocated.
    """
    layout = plan.layout
    values = call_tensors.packed  # it has the values, and perhaps queries and keys
    # The kernels read the tensors of the call, which exist already, and a seed for dropout.
    seed = None
    if layout.has_dropout:
        seed = values.new_empty(1, dtype=torch.int64)
    # The output and its gradient have the type of the values. `lse`, a number for each row, is in fp32.
    out = values
    out_gradient = values
    lse = values.new_empty(1, dtype=torch.float32)
    # Each gradient that is wanted has the type of its tensor. All other gradients are None.
    wanted_tensors = {name: getattr(call_tensors, name) for name in layout.wanted}
    gradients = CallTensors(**wanted_tensors)
    # All partial sums are in fp32. The keys of `memory` are the names of those that the kernels write.
    any_sum = values.new_empty(1, dtype=torch.float32)
    named_sums = dict.fromkeys(plan.launches.memory, any_sum)
    partial_sums = PartialSums(**named_sums)
    return PassTensors(
        call_tensors,
        out=out,
        seed=seed,
        lse=lse,
        out_gradient=out_gradient,
        gradients=gradients,
        sums=partial_sums,
    )


def run(launch: Launch, tensors: PassTensors) -> None:
    """Launches a kernel with the tensors of its pass."""
    arguments = launch.args(tensors)
    if launch.compiled is not None:
        # ``launch.kernel[launch.grid]`` would do, but Triton takes much longer to find the compiled kernel than to
        # launch it.
        launch.compiled(*arguments)
    else:
        launch.kernel[launch.grid](*arguments)  # Triton's interpreter, for which nothing is compiled


def allocate_gradients(plan: Plan, inputs: CallTensors) -> CallTensors:
    """Returns memory for the gradient of each input that needs one, and None for the others."""
    gradients: dict[str, Tensor] = {}
    for name in plan.layout.wanted:
        gradients[name] = torch.empty_like(getattr(inputs, name))
    if plan.has_unused_factors:
        gradients["factors"].zero_()  # the kernels write all of it but the unused factors
    return CallTensors(**gradients)


def allocate_sums(plan: Plan, out_gradient: Tensor) -> PartialSums:
    """Returns memory in fp32 for the partial sums of a backward pass, on the device of the output's gradient."""
    sizes_of_pieces = list(plan.launches.memory.values())
    if not sizes_of_pieces:
        return PartialSums()
    # A single allocation is divided. The kernels rely on tensors that lie one behind the other, and would write into
    # foreign memory if each had an allocation of its own (`launches.measure_memory_of_groups`).
    memory = out_gradient.new_empty(sum(sizes_of_pieces), dtype=torch.float32)
    pieces = memory.split_with_sizes(sizes_of_pieces)  # `split` would be much slower
    piece_of_name = dict(zip(plan.launches.memory, pieces))
    return PartialSums(**piece_of_name)


class KernelAttention(torch.autograd.Function):
    """Launches the kernels of a plan.

    Both passes run for every attention of every training step. To save time they call as few functions as possible.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, seed: Tensor | None, *inputs: Tensor | None) -> Tensor:
        """Returns the result of the kernels, (T B, C), and saves what `backward` reads in `ctx`.

        Args:
            ctx: Autograd's record of this call.
            plan: The launches.
            seed: The seed of the dropped weights, (1,), or None without dropout.
            inputs: The fields of a `CallTensors`. Each is an argument of its own, because autograd does not look for
                tensors inside a record.
        """
        call_tensors = CallTensors(*inputs)  # the record again
        layout = plan.layout
        out = call_tensors.packed.new_empty((layout.length * layout.bsz, layout.num_heads * layout.value_width))
        lse = None
        saved_out = None
        if plan.is_long:
            # For long sentences, the backward pass reads two results of this pass: `out`, and for each row the
            # logarithm of the softmax's denominator, `lse`. For short ones, it computes everything from the
            # inputs. Then `out` is not saved, so that its memory can be freed.
            lse = out.new_empty((layout.bsz, layout.num_heads, layout.length), dtype=torch.float32)
            saved_out = out
        ctx.plan = plan
        ctx.save_for_backward(saved_out, lse, seed, *inputs)  # `backward` takes them in this order
        # torch makes the GPU of the tensors the current one before the backward pass, but not before this pass.
        with torch.cuda.device_of(out):
            run(plan.launches.forward, PassTensors(call_tensors, out, seed, lse))  # fills `out` and `lse`
        return out

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments of ``forward(ctx, plan, seed, *inputs)``, without `ctx`.

        Args:
            ctx: Autograd's record of the call, with the tensors that `forward` has saved.
            out_gradient: The gradient of the output, (T B, C).
        """
        is_recorded_by_autograd = torch.is_grad_enabled()  # with ``create_graph=True``, for second derivatives
        if is_recorded_by_autograd:
            return compute_gradients_once(ctx, out_gradient)
        return compute_gradients(ctx, out_gradient)


def compute_gradients(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Returns what `KernelAttention.backward` does, if autograd does not record the backward pass."""
    # A hook on saved tensors, such as torch's `save_on_cpu`, may bring them back to an address that is not aligned.
    out, lse, seed, *inputs = align_memory(ctx.saved_tensors)  # in the order in which `forward` has saved them
    gradients = launch_backward(
        ctx.plan,
        CallTensors(*inputs),
        seed=seed,
        out=out,
        lse=lse,
        out_gradient=copy_unless_aligned(out_gradient.contiguous()),
    )
    # One gradient for each argument of `forward`. The inputs were the fields of a `CallTensors`, as these are.
    gradient_of_plan = None
    gradient_of_seed = None
    return (gradient_of_plan, gradient_of_seed, *gradients)


# The same if autograd records the backward pass. It cannot see what the kernels compute. Therefore, it gets results
# that raise an error when they are differentiated. All other calls leave this out, as it takes as long as two launches.
compute_gradients_once = once_differentiable(compute_gradients)


def launch_backward(
    plan: Plan,
    call_tensors: CallTensors,
    seed: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    out_gradient: Tensor,
) -> CallTensors:
    """Launches the kernels of a backward pass, and returns the gradient of each tensor of the call that needs one.

    Args:
        plan: The launches.
        call_tensors: The tensors of the call.
        seed: The seed of the dropped weights, or None without dropout.
        out, lse: What the forward pass has written; None for short sentences, for which it is not read.
        out_gradient: The gradient of the output, (T B, C), contiguous.
    """
    # The kernels write these two. So far, they are memory without contents.
    gradients = allocate_gradients(plan, call_tensors)
    partial_sums = allocate_sums(plan, out_gradient)  # gradients of groups of sentences, which the last kernel adds up
    arguments = PassTensors(call_tensors, out, seed, lse, out_gradient, gradients, partial_sums)
    # Each launch fills some of `gradients` and `partial_sums` in place. The order matters: kernels read partial sums
    # that the launches before them have written.
    for launch in plan.launches.backward:
        run(launch, arguments)
    return gradients
