"""Kernels that a GPU would launch for one self-attention block: stock fairseq's and each variant's.

    python benchmarks/launches.py
    python benchmarks/launches.py --dtype bf16 --kernels
    python benchmarks/launches.py --decode
    python benchmarks/launches.py --host --rounds 15

At the sizes of translation a GPU's time is the number of launches more than their work. Counted are calls of ATen that
are neither views nor allocations. Needs no GPU: the block runs on torch's meta device, where tensors have sizes and no
values, on the branch that a GPU takes; forward and backward are counted, torch's fused attention as one call each way.
As there are no values, the number cannot depend on how many lengths a batch has.

With --kernels the Triton kernels of docs/gpu-kernels.md take what they support, as on a GPU of capability 9.0; a launch
of theirs counts as one. With --decode it is one step of a beam search by the base model, on the CPU, whose step has the
same calls: those of 13 tokens without those of 12.

With --host it is time: what the CPU does for a block, forward and backward, of 4 sentences of 8 tokens and width 64, so
that the products take next to nothing, on the branch that a GPU takes; stock's time over each variant's, without and
with the Triton kernels. All of this project's code is timed; Triton's own for a launch, and torch's fused attention,
are left out. A GPU that waits for launches waits for all of this.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import block
import torch
from common import DTYPES, STOCK, base_model, parser, ratios, report, setup, words_dictionary
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.computations import kernels
from fairseq_synth.masks import causal_mask

ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
Noted = Callable[[str], None]
NO_KERNEL = {"detach", "_unsafe_view", "lift_fresh", *ALLOCATIONS}


class Counter(TorchDispatchMode):
    """Lists the names of the calls under it that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        returns = [r.alias_info for r in func._schema.returns]
        if name not in NO_KERNEL and not any(alias is not None and not alias.is_write for alias in returns):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


class FusedAttention(torch.autograd.Function):
    """torch's fused attention as one call each way, without values. `noted` is told of both."""

    @staticmethod
    def forward(ctx: Any, noted: Noted, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.noted = noted
        noted("fused_attention")
        return query.new_empty(*query.shape[:-1], value.size(-1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.noted("fused_attention_backward")
        tensors = zip(ctx.saved_tensors, ctx.needs_input_grad[1:])
        return None, *(torch.empty_like(x) if needed else None for x, needed in tensors)


@contextlib.contextmanager
def on_a_gpu(with_kernels: bool, run: Callable[[kernels.Launch, Any], Any], noted: Noted) -> Iterator[None]:
    """On the branch of a GPU, with the kernels for capability 9.0 or without them.

    Launches of the kernels go to `run`, and the names of torch's fused attention to `noted`.
    """

    def fused_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **__: Any) -> Any:
        return FusedAttention.apply(noted, query, key, value, attn_mask)

    def load(plan: Any, _: Any) -> None:
        plan.is_loaded = True

    computations, switch = "fairseq_synth.computations", "1" if with_kernels else "0"
    patches = [
        mock.patch.multiple(kernels, SWITCH=switch, device_fits=lambda *_: True, load=load, run=run),
        mock.patch(f"{computations}.fused.on_cpu", lambda _: False),
        mock.patch(f"{computations}.tiled.on_cpu", lambda _: False),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", fused_attention),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def count(
    name: str,
    padded: bool,
    bsz: int = 32,
    length: int = 32,
    dtype: torch.dtype = torch.float32,
    with_kernels: bool = False,
) -> list[str]:
    """The calls of one block, forward and backward: the encoder's with padding, or the decoder's with its mask."""
    counter = Counter()

    def run(launch: kernels.Launch, _: Any) -> None:
        counter.calls.append(launch.kernel.__name__)

    with torch.device("meta"):
        module = block.build(name, length, not padded).to(dtype).train()
    x = torch.empty(length, bsz, module.embed_dim, device="meta", dtype=dtype, requires_grad=True)
    key_padding_mask = torch.empty(bsz, length, dtype=torch.bool, device="meta") if padded else None
    attn_mask = None
    if not padded:
        attn_mask = torch.empty(length, length, device="meta", dtype=dtype) if name == STOCK else causal_mask(x)
    with on_a_gpu(with_kernels, run, counter.calls.append), counter:
        out, _ = module(x, x, x, key_padding_mask=key_padding_mask, need_weights=False, attn_mask=attn_mask)
        out.backward(torch.empty_like(out))
    return counter.calls


def count_decoding(name: str, beam: int = 4) -> int:
    """The calls of one step of a beam search by the base model."""
    narrow = {f"{side}_{part}": 64 for side in ("encoder", "decoder") for part in ("embed_dim", "ffn_embed_dim")}
    model = base_model(name, words_dictionary(100), 256, **narrow).eval()  # the calls are those of any width
    model.make_generation_fast_()
    source = torch.randint(4, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((2,), 7)}}
    found = []
    for tokens in (4, 5):
        sizes = {"beam_size": beam, "max_len_a": 0, "max_len_b": tokens, "min_len": tokens}
        generator = SequenceGenerator([model], model.decoder.dictionary, **sizes)
        with torch.no_grad(), Counter() as counter:
            generator.forward(sample)
        found.append(len(counter.calls))
    return found[1] - found[0]


def host_block(name: str, with_kernels: bool, repeats: int = 50) -> Callable[[], None]:
    """Forward and backward passes of a padded block whose work is next to nothing."""
    # a longer ℓ would be work: without a slice, the kernels read all rows of R1 R2^T
    with mock.patch.multiple(block, WIDTH=64, MAX_LENGTH=16):
        module = block.build(name, 8, False).train()
    parameters = list(module.parameters())
    x = torch.randn(8, 4, 64, requires_grad=True)
    key_padding_mask, grad = torch.zeros(4, 8, dtype=torch.bool), torch.ones(8, 4, 64)

    def run() -> None:
        # in fp32, which the kernels take on no other device than a CPU
        with on_a_gpu(with_kernels, lambda launch, tensors: launch.args(tensors), lambda _: None):
            for _ in range(repeats):
                out, _ = module(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)
                out.backward(grad)
                for leaf in (x, *parameters):
                    leaf.grad = None

    return run


def host(variants: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Stock's time over each variant's of what the CPU does for a block."""
    rows: dict[str, dict[str, float]] = {}
    for name in variants:
        blocks = {STOCK: host_block(STOCK, False), "without": host_block(name, False), "with": host_block(name, True)}
        found = ratios(blocks, "cpu", rounds)
        rows[name] = {kind: found[kind]["ratio"] for kind in ("without", "with")}
    return rows


def main() -> None:
    p = parser(__doc__, list(VARIANTS), rounds=1)
    p.add_argument("--decode", action="store_true", help="count a step of a beam search")
    p.add_argument("--kernels", action="store_true", help="with the Triton kernels; needs --dtype bf16 or fp16")
    p.add_argument("--host", action="store_true", help="the CPU's own time for a block")
    args: argparse.Namespace = p.parse_args()
    if args.host:
        setup(args)
        return report(
            "the CPU's own time for a block", "stock's time / this one's", host(args.variants, args.rounds), args
        )
    if args.kernels and args.dtype == "fp32":
        sys.exit("error: --kernels: they are for bf16 and fp16; add --dtype bf16")
    if args.kernels and not kernels.triton_fits():
        sys.exit("error: --kernels: Triton is not installed, or too old; pip install -e .[dev]")
    rows: dict[str, dict[str, float]] = {}
    if args.decode:
        steps = {name: count_decoding(name) for name in [STOCK, *args.variants]}
        rows = {name: {"calls": calls, "over stock's": calls / steps[STOCK]} for name, calls in steps.items()}
        return report("kernels of a step of beam search, beam 4", "launches", rows, args)
    for name in [STOCK, *args.variants]:
        options = dict(dtype=DTYPES[args.dtype], with_kernels=args.kernels)
        calls = {kind: count(name, kind == "padded", **options) for kind in ("padded", "causal")}
        rows[name] = {kind: len(found) for kind, found in calls.items()}
    report("kernels of the attention block", "launches, forward and backward", rows, args)


if __name__ == "__main__":
    main()
