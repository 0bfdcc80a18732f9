"""Kernels that a GPU would launch for one self-attention block: stock fairseq's and each variant's.

    python benchmarks/launches.py
    python benchmarks/launches.py --dtype bf16 --kernels
    python benchmarks/launches.py --decode
    python benchmarks/launches.py --host --rounds 15

At the sizes of translation a GPU's time depends more on the number of launches than on their work. Counted are calls
of ATen that are neither views nor allocations. No GPU is needed: the block runs on torch's meta device, where tensors
have sizes and no values, on the branch that a GPU takes. Forward and backward are counted, torch's fused attention as
one call each way. As there are no values, the number cannot depend on how many lengths a batch has.

With --kernels the Triton kernels of docs/gpu-kernels.md compute what they support, as on a GPU of capability 9.0; each
of their launches counts as one. With --decode the calls of one step of a beam search by the base model are counted, on
the CPU, where a step has the same calls: they are those of a search of 5 tokens without those of a search of 4.

With --host it is time: what the CPU does for a block, forward and backward, of 4 sentences of 8 tokens and width 64, so
that the products take next to nothing, on the branch that a GPU takes; stock's time over each variant's, without and
with the Triton kernels. All of this project's code is timed; Triton's own for a launch, and torch's fused attention,
are left out. A GPU that waits for launches waits for all of this.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import block
import torch
from common import (
    DTYPES,
    FIRST_WORD,
    STOCK,
    build_base_model,
    compare_with_stock,
    kernels,
    make_dictionary,
    make_parser,
    report,
    set_up_device,
)
from fairseq.sequence_generator import SequenceGenerator
from rounds import Function
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_synth.architectures import VARIANTS

ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
WITHOUT_KERNEL = {"detach", "_unsafe_view", "lift_fresh", *ALLOCATIONS}
NUM_WORDS = 100  # entries of the vocabulary of a beam search
# The size of the batch and of the self-attention for which the CPU's own time is measured.
HOST_SENTENCES = 4
HOST_LENGTH = 8
HOST_WIDTH = 64
OnCall = Callable[[str], None]  # takes the name of a call
OnLaunch = Callable[[Any, Any], None]  # takes a launch of a Triton kernel, and the kernel's tensors


# ---- counting


class KernelRecorder(TorchDispatchMode):
    """A context manager that records the names of the kernels that its body launches, in the list `names`.

    A function of ATen that computes something counts as one kernel. Torch's fused attention and Triton kernels are no
    functions of ATen. Where they are launched, `record` and `record_launch` have to be called.
    """

    def __init__(self) -> None:
        """Starts without a kernel."""
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Is called by torch in place of each function of ATen: calls the function, and records its name."""
        name = func._schema.name.split("::")[1]
        if name not in WITHOUT_KERNEL and not returns_a_view(func):
            self.record(name)
        return func(*args, **(kwargs or {}))

    def record(self, name: str) -> None:
        """Records a kernel by its name."""
        self.names.append(name)

    def record_launch(self, launch: Any, _: Any) -> None:
        """Records the Triton kernel of a launch. The second argument, the kernel's tensors, is not needed."""
        self.record(launch.kernel.__name__)


def returns_a_view(function: Any) -> bool:
    """Returns whether a function of ATen only returns a view of an argument, without writing to it."""
    for returned in function._schema.returns:
        alias = returned.alias_info
        if alias is not None and not alias.is_write:
            return True
    return False


class FusedAttention(torch.autograd.Function):
    """Takes the place of torch's fused attention, and reports one call forward and one backward.

    Nothing is computed: outputs and gradients have the right sizes and no meaningful values.
    """

    @staticmethod
    def forward(ctx: Any, on_call: OnCall, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """Returns a tensor of the output's size, and calls `on_call` with the name of the call."""
        ctx.save_for_backward(query, key, value, mask)
        ctx.on_call = on_call
        on_call("fused_attention")
        return query.new_empty(*query.shape[:-1], value.size(-1))

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Any, ...]:
        """Returns a tensor of the gradient's size, or None, for each argument of `forward`."""
        ctx.on_call("fused_attention_backward")
        gradients: list[Tensor | None] = [None]  # `on_call`, the first argument, has no gradient
        for tensor, is_needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:]):
            gradients.append(torch.empty_like(tensor) if is_needed else None)
        return tuple(gradients)


@contextlib.contextmanager
def fake_gpu(with_kernels: bool, on_launch: OnLaunch, on_fused_attention: OnCall) -> Iterator[None]:
    """During the body, makes this project's attention work as if it ran on a GPU. There is no real GPU.

    The attention chooses its computation as on a GPU that supports all kernels of this project. But no Triton kernel is
    launched, and torch's fused attention is not computed. The functions `on_launch` and `on_fused_attention` are called
    in their place. All other operations are left as they are.

    Args:
        with_kernels: whether the Triton kernels are switched on.
        on_launch: is called in place of each launch of a Triton kernel.
        on_fused_attention: is called in place of torch's fused attention, forward and backward, with the call's name.
    """
    # Two computations of this project do something else on a CPU. They ask the function `on_cpu` where they are.
    fused_is_not_on_cpu = mock.patch("fairseq_synth.computations.fused.on_cpu", lambda _: False)
    tiled_is_not_on_cpu = mock.patch("fairseq_synth.computations.tiled.on_cpu", lambda _: False)
    with (
        fused_is_not_on_cpu,
        tiled_is_not_on_cpu,
        replace_kernels(with_kernels, on_launch),
        replace_fused_attention(on_fused_attention),
    ):
        yield


@contextlib.contextmanager
def replace_kernels(with_kernels: bool, on_launch: OnLaunch) -> Iterator[None]:
    """During the body, calls `on_launch` in place of each launch of a Triton kernel, as if a GPU supported all kernels.

    Args:
        with_kernels: whether the kernels are switched on. Otherwise none is launched.
        on_launch: is called with what `kernels.run` gets: a launch and the kernel's tensors.
    """
    # The kernels are used if the constant SWITCH is "1". It has the value of the environment variable that users set.
    switch = "1" if with_kernels else "0"
    set_switch = mock.patch.object(kernels, "SWITCH", switch)
    # `device_fits` returns whether a GPU is new enough for the kernels. There is no GPU, so it would return False.
    pretend_that_gpu_fits = mock.patch.object(kernels, "device_fits", return_true)
    # `load` compiles the kernels of a computation and checks them, for which it needs a GPU.
    skip_compilation = mock.patch.object(kernels, "load", mark_as_loaded)
    # `run` launches a compiled kernel.
    replace_launches = mock.patch.object(kernels, "run", on_launch)
    with set_switch, pretend_that_gpu_fits, skip_compilation, replace_launches:
        yield


def return_true(*_: Any) -> bool:
    """Returns True, whatever the arguments are."""
    return True


def mark_as_loaded(plan: Any, _: Any) -> bool:
    """Takes the place of `kernels.load`: marks the kernels of a plan as loaded, and returns True, for success.

    A plan has the kernels that attentions of one size need. `kernels.load` marks it in the same way, so that the next
    attention of this size does not load the kernels again.
    """
    plan.is_loaded = True
    return True


@contextlib.contextmanager
def replace_fused_attention(on_fused_attention: OnCall) -> Iterator[None]:
    """During the body, replaces torch's fused attention by the class `FusedAttention`, which computes nothing.

    On a CPU and on the device "meta", torch would compute it by other operations than on a GPU.

    `on_fused_attention`: a function that `FusedAttention` calls with its name, once forward and once backward.
    """

    def report_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **__: Any) -> Any:
        """Takes the place of torch's scaled_dot_product_attention, whose further arguments do not matter here."""
        return FusedAttention.apply(on_fused_attention, query, key, value, attn_mask)

    with mock.patch("torch.nn.functional.scaled_dot_product_attention", report_attention):
        yield


@contextlib.contextmanager
def record_gpu_kernels(with_kernels: bool) -> Iterator[list[str]]:
    """Records the kernels that the body would launch on a GPU. Yields the list to which their names are added.

    `with_kernels`: whether the Triton kernels are switched on.
    """
    recorder = KernelRecorder()  # sees the functions of ATen that the body calls
    # Triton kernels and torch's fused attention are no functions of ATen, so they are reported to the recorder.
    gpu = fake_gpu(with_kernels, on_launch=recorder.record_launch, on_fused_attention=recorder.record)
    with gpu, recorder:
        yield recorder.names


def list_launches(
    name: str,
    causal: bool,
    sentences: int = 32,
    length: int = 32,
    dtype: torch.dtype = torch.float32,
    with_kernels: bool = False,
) -> list[str]:
    """Returns the names of the kernels that a self-attention launches on a GPU, forward and backward.

    No GPU is needed. The tensors are on torch's device "meta", where the operations are called as usual, but nothing is
    computed: tensors have a shape and a dtype, and no values. So the input and the gradient of the output can be empty.

    Args:
        name: ``stock`` or a variant.
        causal: True for the decoder's attention, with its mask of later tokens; False for the encoder's, with padding.
        sentences: how many the batch has.
        length: how many tokens each sentence has.
        dtype: of parameters and input.
        with_kernels: whether the Triton kernels compute the variants that they support.
    """
    with torch.device("meta"):
        module = block.build_block(name, length, causal).to(dtype).train()
        x = torch.empty(length, sentences, module.embed_dim, dtype=dtype, requires_grad=True)
        masks = block.make_masks(module, x, causal)
    with record_gpu_kernels(with_kernels) as names:
        output, _ = module(query=x, key=x, value=x, need_weights=False, **masks)
        output.backward(torch.empty_like(output))
    return names


def count_launches_of_decoding(name: str, beam: int = 4) -> int:
    """Returns how many kernels the base model launches for one step of a beam search.

    Args:
        name: ``stock`` or a variant.
        beam: the size of the beam.
    """
    # A narrow model makes the same calls in less time.
    narrow_sizes = {
        "encoder_embed_dim": 64,
        "encoder_ffn_embed_dim": 64,
        "decoder_embed_dim": 64,
        "decoder_ffn_embed_dim": 64,
    }
    dictionary = make_dictionary(NUM_WORDS)
    model = build_base_model(name, dictionary, max_length=256, **narrow_sizes).eval()
    model.make_generation_fast_()
    # A search of 5 tokens has one step more than a search of 4 tokens.
    launches_for_4_tokens = count_launches_of_search(model, beam, tokens=4)
    launches_for_5_tokens = count_launches_of_search(model, beam, tokens=5)
    return launches_for_5_tokens - launches_for_4_tokens


def count_launches_of_search(model: Any, beam: int, tokens: int) -> int:
    """Returns how many kernels a model launches to translate two sentences by beam search.

    Args:
        model: the model, in eval mode.
        beam: the size of the beam.
        tokens: how many tokens each translation has.
    """
    sample = {"net_input": make_source(sentences=2, length=7)}
    search = SequenceGenerator(
        [model],
        model.decoder.dictionary,
        beam_size=beam,
        # A translation has at least `min_len` tokens, and at most max_len_a * (length of its source) + max_len_b.
        # With these values, it has exactly `tokens` tokens.
        max_len_a=0,
        max_len_b=tokens,
        min_len=tokens,
    )
    with torch.no_grad(), KernelRecorder() as recorder:
        search.forward(sample)
    return len(recorder.names)


def make_source(sentences: int, length: int) -> dict[str, Tensor]:
    """Returns sentences of random words, the same in every call, as fairseq's models take them."""
    generator = torch.Generator().manual_seed(0)
    return {
        "src_tokens": torch.randint(FIRST_WORD, NUM_WORDS, (sentences, length), generator=generator),
        "src_lengths": torch.full((sentences,), length),
    }


# ---- the CPU's own time


def make_host_step(name: str, with_kernels: bool, repeats: int = 50) -> Function:
    """Returns a function that does what a CPU does to run a self-attention on a GPU. Its time is to be measured.

    On a GPU, the CPU chooses how attention is computed and launches kernels. The returned function does this work
    without a GPU: the attention believes that there is one, but nothing is launched.

    Args:
        name: ``stock`` or a variant.
        with_kernels: whether the Triton kernels are switched on.
        repeats: how often one call of the returned function runs the attention.
    """
    run_attention = make_narrow_step(name)  # runs a narrow attention forward and backward once

    def step() -> None:
        """Runs the attention forward and backward, `repeats` times."""
        # Two operations that need a GPU are replaced:
        # - In place of launching a Triton kernel, `build_arguments` builds the arguments of the launch.
        # - In place of torch's fused attention, `ignore_fused_attention` does nothing.
        # The other operations of torch run on the CPU, where they take little time with a narrow attention.
        pretended_gpu = fake_gpu(with_kernels, on_launch=build_arguments, on_fused_attention=ignore_fused_attention)
        with pretended_gpu:
            for _ in range(repeats):
                run_attention()

    return step


def build_arguments(launch: Any, tensors: Any) -> None:
    """Takes the place of a launch of a Triton kernel: only builds the kernel's arguments, and does not use them."""
    launch.args(tensors)


def ignore_fused_attention(_: str) -> None:
    """Takes the place of a call of torch's fused attention: does nothing."""


def make_narrow_step(name: str) -> Function:
    """Returns a function that runs a narrow self-attention forward and backward once, on a small batch on the CPU.

    `name`: ``stock`` or a variant.
    """
    module = build_narrow_block(name, HOST_LENGTH)
    # In fp32, as the kernels refuse half precision on a CPU.
    x = torch.randn(HOST_LENGTH, HOST_SENTENCES, HOST_WIDTH, requires_grad=True)
    output_gradient = torch.ones_like(x)
    no_padding = torch.zeros(HOST_SENTENCES, HOST_LENGTH, dtype=torch.bool)
    tensors_with_gradients = [x, *module.parameters()]

    def run_attention() -> None:
        """Runs the attention forward and backward once."""
        output, _ = module(query=x, key=x, value=x, key_padding_mask=no_padding, need_weights=False)
        output.backward(output_gradient)
        # Without this, the next call would add its gradients to these ones.
        for tensor in tensors_with_gradients:
            tensor.grad = None

    return run_attention


def build_narrow_block(name: str, length: int) -> torch.nn.Module:
    """Builds a self-attention of the width `HOST_WIDTH` for sentences of a length, in training mode.

    Its maximum length is twice this length, and not as large as a model's. The parameters R1 and R2 of a factorized
    function have a row for each position up to the maximum length, and the kernels get all of these rows. So a large
    maximum would add work for the CPU.
    """
    return block.build_block(name, length, causal=False, width=HOST_WIDTH, max_length=2 * length).train()


def compare_host_times(variants: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Compares how long the CPU takes to start the work of a GPU, for the self-attention of stock and of the variants.

    Args:
        variants: the variants.
        rounds: how many rounds are timed.

    Returns:
        for example {"random": {"without": 0.9, "with": 0.8}}. The numbers are stock's time divided by the variant's,
        without and with the Triton kernels.
    """
    rows = {}
    for variant in variants:
        steps = {
            STOCK: make_host_step(STOCK, with_kernels=False),
            "without": make_host_step(variant, with_kernels=False),
            "with": make_host_step(variant, with_kernels=True),
        }
        # These functions only pretend to use a GPU. They do all their work on the CPU, which has to be timed.
        comparisons = compare_with_stock(steps, device="cpu", rounds=rounds)
        rows[variant] = {"without": comparisons["without"].ratio, "with": comparisons["with"].ratio}
    return rows


# ---- the command


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line. Ends with a one-line error if the kernels cannot be counted."""
    parser = make_parser(__doc__, list(VARIANTS), rounds=1)
    parser.add_argument("--decode", action="store_true", help="count a step of a beam search")
    parser.add_argument("--kernels", action="store_true", help="with the Triton kernels; needs --dtype bf16 or fp16")
    parser.add_argument("--host", action="store_true", help="the CPU's own time for a block")
    args = parser.parse_args()
    if args.kernels and args.dtype == "fp32":
        sys.exit("error: --kernels: they are for bf16 and fp16; add --dtype bf16")
    if args.kernels and not kernels.triton_fits():
        sys.exit("error: --kernels: Triton is not installed, or too old; pip install -e .[dev]")
    return args


def report_host_times(args: argparse.Namespace) -> None:
    """Measures and prints the time that the CPU needs for a self-attention on a GPU, for all variants."""
    # The outputs of kernels that do not run are uninitialised memory. Denormal numbers in it would slow down products.
    torch.set_flush_denormal(True)
    set_up_device(args)
    rows = compare_host_times(args.variants, args.rounds)
    report("the CPU's own time for a block", "stock's time / this one's", rows, args)


def report_decoding(args: argparse.Namespace) -> None:
    """Counts and prints the kernels of one step of a beam search, for stock fairseq and all variants."""
    num_launches = {name: count_launches_of_decoding(name) for name in [STOCK, *args.variants]}
    rows = {}
    for name, number in num_launches.items():
        rows[name] = {"calls": number, "over stock's": number / num_launches[STOCK]}
    report("kernels of a step of beam search, beam 4", "launches", rows, args)


def report_block(args: argparse.Namespace) -> None:
    """Counts and prints the kernels of a self-attention, for stock fairseq and all variants."""
    rows = {}
    for name in [STOCK, *args.variants]:
        padded = list_launches(name, causal=False, dtype=DTYPES[args.dtype], with_kernels=args.kernels)
        causal = list_launches(name, causal=True, dtype=DTYPES[args.dtype], with_kernels=args.kernels)
        rows[name] = {"padded": len(padded), "causal": len(causal)}
    report("kernels of the attention block", "launches, forward and backward", rows, args)


def main() -> None:
    """Counts the kernels of a self-attention or of a beam search, or measures the CPU's own time, as the flags say."""
    args = parse_flags()
    if args.host:
        report_host_times(args)
    elif args.decode:
        report_decoding(args)
    else:
        report_block(args)


if __name__ == "__main__":
    main()
