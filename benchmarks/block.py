"""One self-attention block, forward and backward: stock fairseq's time over each variant's.

    python benchmarks/block.py --shapes 128x32 32x128 16x256
    python benchmarks/block.py --shapes 4x1024 --causal

The block is that of the base model: width 512, 8 heads. Without --causal it is the encoder's, with sentences
of three lengths, sorted as fairseq sorts a batch; with --causal it is the decoder's, with the mask that each model's
decoder gives it.
"""

from collections.abc import Callable
from typing import Any

import torch
from common import CONVOLUTIONS, DTYPES, STOCK, cells, parser, ratios, report, setup
from fairseq.modules import DynamicConv, LightweightConv, MultiheadAttention
from torch import Tensor, nn

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.heads import parse_spec
from fairseq_synth.masks import causal_mask
from fairseq_synth.synthesizers import Mixture

WIDTH, HEADS, MAX_LENGTH, RANK, KERNEL = 512, 8, 256, 8, 31


def build(name: str, length: int, causal: bool) -> nn.Module:
    """Stock fairseq's attention, one of its convolutions, or a variant of ours."""
    torch.manual_seed(0)
    if name == STOCK:
        return MultiheadAttention(WIDTH, HEADS, self_attention=True)
    if name in CONVOLUTIONS:
        return Convolution(name, causal)
    mixture = Mixture(parse_spec(name), "convex", HEADS, WIDTH // HEADS, max(MAX_LENGTH, length), RANK)
    return SyntheticAttention(WIDTH, HEADS, mixture)


class Convolution(nn.Module):
    """fairseq's lightweight or dynamic convolution as its layers hold it, gate and output projection included."""

    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        kind = LightweightConv if name == "lightconv" else DynamicConv
        padding = KERNEL - 1 if causal else KERNEL // 2
        self.gate = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())
        self.conv = kind(WIDTH, KERNEL, padding_l=padding, weight_softmax=True, num_heads=HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any, **_: Any) -> Any:
        x = self.gate(query)
        if key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask.transpose(0, 1).unsqueeze(2), 0)
        return self.out(self.conv(x)), None


def padding(bsz: int, length: int, device: str) -> Tensor:
    """Padding mask (B, T) of three lengths: half of the sentences full, a quarter each a little shorter."""
    lengths = torch.full((bsz,), length)
    lengths[bsz // 2 :] -= max(1, length // 16)
    lengths[3 * bsz // 4 :] -= max(1, length // 16)
    return (torch.arange(length)[None] >= lengths[:, None]).to(device)


def step(module: nn.Module, bsz: int, length: int, causal: bool, args: Any) -> Callable[[], None]:
    """A call that runs the block forward and backward, gradients of the input included."""
    dtype = DTYPES[args.dtype]
    parameters = list(module.to(args.device, dtype).train().parameters())
    x = torch.randn(length, bsz, WIDTH, device=args.device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    key_padding_mask = None if causal else padding(bsz, length, args.device)
    future = torch.triu(torch.full((length, length), float("-inf"), device=args.device, dtype=dtype), 1)
    if isinstance(module, SyntheticAttention):
        future = causal_mask(x)

    def run() -> None:
        out, _ = module(
            x, x, x, key_padding_mask=key_padding_mask, need_weights=False, attn_mask=future if causal else None
        )
        out.backward(grad)
        for leaf in (x, *parameters):  # `Module.zero_grad` would count the modules of each block
            leaf.grad = None

    return run


def main() -> None:
    p = parser(__doc__, [*VARIANTS, *CONVOLUTIONS], rounds=7)
    p.add_argument("--shapes", nargs="+", default=["128x32", "32x128", "16x256"], help="sentences x tokens")
    p.add_argument("--causal", action="store_true", help="the decoder's block, no padding")
    args = p.parse_args()
    setup(args)
    rows: dict[str, dict[str, float]] = {name: {} for name in args.variants}
    for shape in args.shapes:
        bsz, length = (int(n) for n in shape.split("x"))
        for name in args.variants:  # two at a time: what is compared is timed within a second
            steps = {n: step(build(n, length, args.causal), bsz, length, args.causal, args) for n in (STOCK, name)}
            rows[name].update(cells(shape, ratios(steps, args.device, args.rounds)[name]))
    report(f"attention block, {'causal' if args.causal else 'padded'}", "stock's time / this one's", rows, args)


if __name__ == "__main__":
    main()
