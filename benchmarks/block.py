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
from rounds import Comparison, Function
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
KERNEL_SIZE = 31  # the width of the convolutions' kernels


def build_block(
    name: str, length: int, causal: bool, width: int = WIDTH, heads: int = HEADS, max_length: int = MAX_LENGTH
) -> nn.Module:
    """Builds one self-attention, with its projections and the same random weights in every call.

    Args:
        name: ``stock`` for fairseq's attention, ``lightconv`` or ``dynamicconv`` for fairseq's convolutions, or a
            variant of this project.
        length: the most tokens that a sentence will have. It matters to Synthesizers, which have parameters for each
            position.
        causal: True for the decoder's, which sees no later tokens. It matters to convolutions.
        width: C, the size of a token's vector.
        heads: the number of heads.
        max_length: ℓ, the maximum length of Synthesizers, unless `length` is larger.
    """
    torch.manual_seed(0)
    if name == STOCK:
        return MultiheadAttention(width, heads, self_attention=True)
    if name in CONVOLUTIONS:
        return Convolution(name, causal, width, heads)
    # A variant such as "random+vanilla" is a mixture of several functions. A single function is made as a mixture, too.
    functions = Mixture(
        parse_spec(name),
        mixture="convex",
        num_heads=heads,
        head_dim=width // heads,
        max_length=max(max_length, length),
        rank=RANK,
    )
    return SyntheticAttention(width, heads, functions)


class Convolution(nn.Module):
    """A convolution of fairseq with the gate and the output projection that its layers have around it.

    It is called like an attention.
    """

    def __init__(self, name: str, causal: bool, width: int, heads: int) -> None:
        """Builds the convolution.

        Args:
            name: ``lightconv`` or ``dynamicconv``.
            causal: True if it sees no later tokens. Otherwise it sees as many later as earlier tokens.
            width: C, the size of a token's vector.
            heads: the number of heads.
        """
        super().__init__()
        convolution_class = LightweightConv if name == "lightconv" else DynamicConv
        # `padding_l` is how many earlier tokens a token sees. In all, it sees `KERNEL_SIZE` tokens, itself among them.
        earlier_tokens = KERNEL_SIZE - 1 if causal else KERNEL_SIZE // 2
        self.gate = nn.Sequential(nn.Linear(width, 2 * width), nn.GLU())
        self.conv = convolution_class(
            width, KERNEL_SIZE, padding_l=earlier_tokens, weight_softmax=True, num_heads=heads
        )
        self.out = nn.Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any, **_: Any) -> Any:
        """Returns the output (T, B, C) for the query (T, B, C), and None in place of attention weights.

        Args:
            query: the input.
            key: is not read, as it is the query.
            value: is not read, as it is the query.
            key_padding_mask: (B, T), True at padding; or None.
        """
        x = self.gate(query)
        if key_padding_mask is not None:
            is_padding = key_padding_mask.transpose(0, 1).unsqueeze(2)  # (T, B, 1)
            x = x.masked_fill(is_padding, 0)
        return self.out(self.conv(x)), None


def make_masks(module: nn.Module, x: Tensor, causal: bool) -> dict[str, Tensor | None]:
    """Returns the masks with which a self-attention is called, as its keyword arguments.

    Args:
        module: the self-attention.
        x: its input, (T, B, C).
        causal: True for a mask of later tokens and no padding; False for padding.
    """
    if causal:
        return {"key_padding_mask": None, "attn_mask": make_attention_mask(module, x)}
    length, sentences, _ = x.shape
    return {"key_padding_mask": make_padding_mask(sentences, length, x.device), "attn_mask": None}


def make_padding_mask(sentences: int, length: int, device: torch.device) -> Tensor:
    """Returns a padding mask (B, T), True at padding, for sentences of three lengths, the longest first.

    Half of the sentences have all tokens. The third quarter is a sixteenth shorter, and the last quarter an eighth.
    """
    a_sixteenth = max(1, length // 16)
    third_quarter = sentences // 2  # the index of its first sentence
    last_quarter = 3 * sentences // 4
    lengths = torch.full((sentences,), length)  # (B,)
    lengths[third_quarter:last_quarter] = length - a_sixteenth
    lengths[last_quarter:] = length - 2 * a_sixteenth
    positions = torch.arange(length)  # (T,)
    is_padding = positions.unsqueeze(0) >= lengths.unsqueeze(1)  # (B, T)
    return is_padding.to(device)


def make_attention_mask(module: nn.Module, x: Tensor) -> Tensor:
    """Returns a mask that hides later tokens, in the form that a self-attention gets from its decoder.

    For this project's attention it is a tensor without elements, which stands for such a mask. For other modules it is
    fairseq's matrix (T, T), which is minus infinity at later tokens.

    Args:
        module: the self-attention that gets the mask.
        x: its input, (T, B, C).
    """
    if isinstance(module, SyntheticAttention):
        return causal_mask(x)
    length = x.size(0)
    matrix = torch.full((length, length), float("-inf"), device=x.device, dtype=x.dtype)
    return matrix.triu(diagonal=1)  # The token itself, on the diagonal, and earlier tokens are 0.


def make_step(module: nn.Module, shape: str, causal: bool, args: argparse.Namespace) -> Function:
    """Returns a function that runs a self-attention forward and backward once, on random sentences.

    Args:
        module: as `build_block` returns it. It is moved to the device and dtype of `args`, in training mode.
        shape: the size of the batch, as sentences x tokens.
        causal: True for a mask of later tokens and no padding; False for padding.
        args: has the device and the dtype.
    """
    sentences, length = parse_shape(shape)
    dtype = DTYPES[args.dtype]
    module.to(args.device, dtype).train()
    x = torch.randn(length, sentences, WIDTH, device=args.device, dtype=dtype, requires_grad=True)
    output_gradient = torch.randn_like(x)
    masks = make_masks(module, x, causal)
    tensors_with_gradients = [x, *module.parameters()]

    def step() -> None:
        """Runs the attention forward and backward once."""
        output, _ = module(query=x, key=x, value=x, need_weights=False, **masks)
        output.backward(output_gradient)
        # Without this, the next call would add its gradients to these ones. module.zero_grad() does the same, but takes
        # longer for variants that consist of more modules.
        for tensor in tensors_with_gradients:
            tensor.grad = None

    return step


def compare_variant(variant: str, shape: str, args: argparse.Namespace) -> Comparison:
    """Times the self-attention of stock fairseq and of a variant in turns, and returns the variant's relative speed.

    Args:
        variant: the name of the variant.
        shape: the size of the batch, as sentences x tokens.
        args: the command line's flags.
    """
    length = parse_shape(shape).tokens
    steps = {}
    for name in (STOCK, variant):
        module = build_block(name, length, args.causal)
        steps[name] = make_step(module, shape, causal=args.causal, args=args)
    return compare_with_stock(steps, args.device, args.rounds)[variant]


def main() -> None:
    """Compares the self-attention of all variants with stock fairseq's, and prints a table."""
    parser = make_parser(__doc__, [*VARIANTS, *CONVOLUTIONS], rounds=7)
    parser.add_argument("--shapes", nargs="+", default=["128x32", "32x128", "16x256"], help="sentences x tokens")
    parser.add_argument("--causal", action="store_true", help="the decoder's block, no padding")
    args = parser.parse_args()
    set_up_device(args)
    rows: dict[str, dict[str, float]] = {name: {} for name in args.variants}
    for shape in args.shapes:
        for variant in args.variants:
            # Each variant is timed in turns with stock alone, so that both times are taken within a second.
            comparison = compare_variant(variant, shape, args)
            rows[variant].update(table_cells(shape, comparison))
    mask = "causal" if args.causal else "padded"
    report(f"attention block, {mask}", "stock's time / this one's", rows, args)


if __name__ == "__main__":
    main()
