"""One training step of the base model (forward, backward, clipping, Adam): stock fairseq's time over each variant's.

    python benchmarks/step.py --shapes 32x32 4x256
    python benchmarks/step.py --shapes 32x32 --max-length 1024 --variants random
    python benchmarks/step.py --shapes 128x32 128x256 --device cuda --dtype bf16

Label-smoothed cross-entropy over a joint vocabulary, no dropout, sentences of one length.
"""

import sys
from typing import Callable, Dict

import torch
from common import CONVOLUTIONS, DTYPES, STOCK, base_model, cells, parser, ratios, report, setup
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.optim.adam import Adam
from torch import nn

from fairseq_synth.architectures import VARIANTS


class Step:
    """A model with its optimizer; a call is one step on a batch."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: str) -> None:
        self.model = model.to(device, dtype).train()
        self.optimizer = Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98))

    def on(self, source: torch.Tensor, target: torch.Tensor, pad: int) -> Callable[[], None]:
        def run() -> None:
            self.optimizer.zero_grad(set_to_none=True)
            out = self.model(source, torch.full((len(source),), source.size(1), device=source.device), target)
            log_probs = self.model.get_normalized_probs(out, log_probs=True)
            loss, _ = label_smoothed_nll_loss(
                log_probs.view(-1, log_probs.size(-1)), target.flatten()[:, None], 0.1, ignore_index=pad
            )
            loss.backward()
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 1.0)
            self.optimizer.step()

        return run


def main() -> None:
    p = parser(__doc__, [*VARIANTS, *CONVOLUTIONS], rounds=5)
    p.add_argument("--shapes", nargs="+", default=["32x32", "4x256"], help="sentences x tokens, source and target")
    p.add_argument("--max-length", type=int, default=256, help="--synth-max-length")
    p.add_argument("--words", type=int, default=32768, help="size of the vocabulary")
    args = p.parse_args()
    setup(args)
    rows: Dict[str, Dict[str, float]] = {}
    stock = Step(base_model(STOCK, args.words, args.max_length), DTYPES[args.dtype], args.device)
    for name in args.variants:  # two models at a time: all of them need 15 GB
        variant = Step(base_model(name, args.words, args.max_length), DTYPES[args.dtype], args.device)
        rows[name] = {}
        for shape in args.shapes:
            bsz, length = (int(n) for n in shape.split("x"))
            torch.manual_seed(0)
            source, target = torch.randint(4, args.words, (2, bsz, length), device=args.device)
            steps = {STOCK: stock.on(source, target, 1), name: variant.on(source, target, 1)}
            rows[name].update(cells(shape, ratios(steps, args.device, args.rounds)[name]))
        print(name, rows[name], file=sys.stderr, flush=True)
    report(f"training step of the base model, l = {args.max_length}", "stock's time / this one's", rows, args)


if __name__ == "__main__":
    main()
