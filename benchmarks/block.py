"""One self-attention block, forward and backward: stock fairseq's time over each variant's.

    python benchmarks/block.py --shapes 128x32 32x128 16x256
    python benchmarks/block.py --shapes 4x1024 --causal

The block is that of the base model: width 512, 8 heads. Without --causal it is the encoder's, with sentences
of three lengths, sorted as fairseq sorts a batch; with --causal it is the decoder's, with the mask that each model's
decoder gives it.
"""

import argparse
from typing import Any

import torch
from common import (
    CONVOLUTIONS,
    DTYPES,
    STOCK,
    compare_with_stock,
    make_parser,
    parse_shape,
    report,
    set_up_device,
    table_cells,
)
from fairseq.modules import DynamicConv, LightweightConv, MultiheadAttention
from rounds import Function
from torch import Tensor, nn

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.heads import parse_spec
from fairseq_synth.masks import causal_mask
from fairseq_synth.synthesizers import Mixture

WIDTH = 512
HEADS = 8
MAX_LENGTH = 256  # ℓ, unless the sentences are longer
RANK = 8
KERNEL_SIZE = 31  # of the convolutions


def build_block(name: str, length: int, causal: bool) -> nn.Module:
    """Builds stock fairseq's attention, one of its convolutions, or a variant for sentences of up to `length`."""
    torch.manual_seed(0)
    if name == STOCK:
        return MultiheadAttention(WIDTH, HEADS, self_attention=True)
    if name in CONVOLUTIONS:
        return Convolution(name, causal)
    mixture = Mixture(
        parse_spec(name),
        mixture="convex",
        num_heads=HEADS,
        head_dim=WIDTH // HEADS,
        max_length=max(MAX_LENGTH, length),
        rank=RANK,
    )
    return SyntheticAttention(WIDTH, HEADS, mixture)


class Convolution(nn.Module):
    """fairseq's lightweight or dynamic convolution with the gate and output projection of its layers."""

    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        convolution = LightweightConv if name == "lightconv" else DynamicConv
        # a causal convolution sees no later tokens, the encoder's sees as many to the right as to the left
        padding = KERNEL_SIZE - 1 if causal else KERNEL_SIZE // 2
        self.gate = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())
        self.conv = convolution(WIDTH, KERNEL_SIZE, padding_l=padding, weight_softmax=True, num_heads=HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any, **_: Any) -> Any:
        """Has the signature of fairseq's attention; `key` and `value` are the query."""
        x = self.gate(query)
        if key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask.transpose(0, 1).unsqueeze(2), 0)
        return self.out(self.conv(x)), None


def make_padding_mask(sentences: int, length: int, device: str) -> Tensor:
    """Returns a padding mask (B, T) of three lengths: half of the sentences full, two quarters a little shorter."""
    lengths = torch.full((sentences,), length)
    reduction = max(1, length // 16)
    lengths[sentences // 2 :] -= reduction
    lengths[3 * sentences // 4 :] -= reduction
    return (torch.arange(length)[None] >= lengths[:, None]).to(device)


def make_attention_mask(module: nn.Module, x: Tensor) -> Tensor:
    """Returns the mask (T, T) of the future that the decoder of a module's model gives to it."""
    if isinstance(module, SyntheticAttention):
        return causal_mask(x)
    length = x.size(0)
    return torch.triu(torch.full((length, length), float("-inf"), device=x.device, dtype=x.dtype), 1)


def make_step(module: nn.Module, shape: str, causal: bool, args: argparse.Namespace) -> Function:
    """Returns a function that runs a block forward and backward on random sentences.

    Args:
        module: the block, which is moved to the device of `args`.
        shape: sentences x tokens.
        causal: masks the future, without padding; otherwise sentences are padded.
        args: has the device and the dtype.
    """
    sentences, length = parse_shape(shape)
    dtype = DTYPES[args.dtype]
    module.to(args.device, dtype).train()
    x = torch.randn(length, sentences, WIDTH, device=args.device, dtype=dtype, requires_grad=True)
    output_gradient = torch.randn_like(x)
    key_padding_mask = None if causal else make_padding_mask(sentences, length, args.device)
    attention_mask = make_attention_mask(module, x) if causal else None
    leaves = [x, *module.parameters()]

    def step() -> None:
        """Runs the block once."""
        output, _ = module(x, x, x, key_padding_mask=key_padding_mask, need_weights=False, attn_mask=attention_mask)
        output.backward(output_gradient)
        for leaf in leaves:  # zero_grad would walk over the modules, of which blocks have different numbers
            leaf.grad = None

    return step


def main() -> None:
    """Compares the blocks of all variants with stock fairseq's."""
    parser = make_parser(__doc__, [*VARIANTS, *CONVOLUTIONS], rounds=7)
    parser.add_argument("--shapes", nargs="+", default=["128x32", "32x128", "16x256"], help="sentences x tokens")
    parser.add_argument("--causal", action="store_true", help="the decoder's block, no padding")
    args = parser.parse_args()
    set_up_device(args)
    rows: dict[str, dict[str, float]] = {name: {} for name in args.variants}
    for shape in args.shapes:
        _, length = parse_shape(shape)
        for variant in args.variants:
            # two blocks at a time, so that their times are taken within a second of each other
            steps = {}
            for name in (STOCK, variant):
                steps[name] = make_step(build_block(name, length, args.causal), shape, args.causal, args)
            comparison = compare_with_stock(steps, args.device, args.rounds)[variant]
            rows[variant].update(table_cells(shape, comparison))
    report(f"attention block, {'causal' if args.causal else 'padded'}", "stock's time / this one's", rows, args)


if __name__ == "__main__":
    main()
