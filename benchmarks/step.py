"""One training step of the base model (forward, backward, clipping, Adam): stock fairseq's time over each variant's.

    python benchmarks/step.py --data data/multi30k-en-de/bin
    python benchmarks/step.py --shapes 32x32 4x256
    python benchmarks/step.py --shapes 32x32 --max-length 1024 --variants random
    python benchmarks/step.py --shapes 8x512 4x1024 --target-tokens 64 --max-length 1024
    python benchmarks/step.py --shapes 128x32 128x256 --device cuda --dtype bf16

With --data the batches are those that fairseq-train forms of a corpus: sentences of like lengths, sources padded on the
left, targets on the right. With --shapes they are random words, all sentences of one length. Label-smoothed
cross-entropy, no dropout.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import CONVOLUTIONS, DTYPES, STOCK, base_model, cells, parser, ratios, report, setup, words_dictionary
from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.data import Dictionary
from fairseq.optim.adam import Adam
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import nn

from fairseq_synth.architectures import VARIANTS

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # source, its lengths, decoder's input, target


class Step:
    """A model with its optimizer; a call of what `on` returns is one step on each batch."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: str) -> None:
        self.model = model.to(device, dtype).train()
        self.optimizer = Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98))

    def on(self, batches: list[Batch], pad: int) -> Callable[[], None]:
        def run() -> None:
            for source, lengths, previous, target in batches:
                self.optimizer.zero_grad(set_to_none=True)
                out = self.model(source, lengths, previous)
                log_probs = self.model.get_normalized_probs(out, log_probs=True)
                loss, _ = label_smoothed_nll_loss(
                    log_probs.view(-1, log_probs.size(-1)), target.flatten()[:, None], 0.1, ignore_index=pad
                )
                loss.backward()
                nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 1.0)
                self.optimizer.step()

        return run


def random_batch(shape: str, words: int, device: str, target_tokens: int | None = None) -> Batch:
    """A batch of random words; `shape` is sentences x tokens. Targets have as many tokens, if not others are given."""
    bsz, length = (int(n) for n in shape.split("x"))
    torch.manual_seed(0)
    source, target = torch.randint(4, words, (2, bsz, length), device=device)
    target = target[:, :target_tokens]
    return source, torch.full((bsz,), length, device=device), target, target


def corpus_batches(args: argparse.Namespace) -> tuple[Dictionary, list[Batch]]:
    """The dictionary of ``--data``, and every so many of the batches of its training set."""
    # what Hydra would fill in
    config = TranslationConfig(data=args.data, dataset_impl="mmap", train_subset="train", required_seq_len_multiple=1)
    task = TranslationTask.setup_task(config)
    task.load_dataset("train")
    iterator = task.get_batch_iterator(task.dataset("train"), max_tokens=args.max_tokens, seed=1)
    formed: list[Any] = list(iterator.next_epoch_itr(shuffle=True))
    chosen = formed[:: max(1, len(formed) // args.batches)][: args.batches]
    if args.device == "cuda":
        chosen = [utils.move_to_cuda(sample) for sample in chosen]
    fields = ("src_tokens", "src_lengths", "prev_output_tokens")
    return task.source_dictionary, [(*(s["net_input"][f] for f in fields), s["target"]) for s in chosen]


def main() -> None:
    p = parser(__doc__, [*VARIANTS, *CONVOLUTIONS], rounds=5)
    p.add_argument("--data", help="a corpus as fairseq-preprocess writes it, with a joined dictionary")
    p.add_argument("--max-tokens", type=int, default=1024, help="of a batch of --data, as fairseq-train counts them")
    p.add_argument("--batches", type=int, default=6, help="of --data, in a round")
    p.add_argument("--shapes", nargs="+", help="sentences x tokens, source and target (default: 32x32 4x256)")
    p.add_argument("--target-tokens", type=int, metavar="N", help="of a target, with --shapes (default: as the source)")
    p.add_argument("--max-length", type=int, default=256, help="--synth-max-length")
    p.add_argument("--words", type=int, default=32768, help="size of the vocabulary, with --shapes")
    args = p.parse_args()
    setup(args)
    if args.data and args.shapes:
        sys.exit("error: --data and --shapes: give one of them")
    columns: dict[str, list[Batch]] = {}
    if args.data:
        dictionary, found = corpus_batches(args)
        columns[f"{args.max_tokens} tokens"] = found
    else:
        dictionary = words_dictionary(args.words)
        for shape in args.shapes or ["32x32", "4x256"]:
            columns[shape] = [random_batch(shape, args.words, args.device, args.target_tokens)]
    rows: dict[str, dict[str, float]] = {}
    stock = Step(base_model(STOCK, dictionary, args.max_length), DTYPES[args.dtype], args.device)
    for name in args.variants:  # two models at a time: all of them need 15 GB
        variant = Step(base_model(name, dictionary, args.max_length), DTYPES[args.dtype], args.device)
        rows[name] = {}
        for column, batches in columns.items():
            steps = {STOCK: stock.on(batches, dictionary.pad()), name: variant.on(batches, dictionary.pad())}
            rows[name].update(cells(column, ratios(steps, args.device, args.rounds)[name]))
        print(name, rows[name], file=sys.stderr, flush=True)
    what = "batches of a corpus" if args.data else "one length"
    report(f"training step of the base model, {what}, l = {args.max_length}", "stock's time / this one's", rows, args)


if __name__ == "__main__":
    main()
