"""One training step of the base model (forward, backward, clipping, Adam): stock fairseq's time over each variant's.

    python benchmarks/step.py --data data/multi30k-en-de/bin
    python benchmarks/step.py --shapes 32x32 4x256
    python benchmarks/step.py --shapes 32x32 --max-length 1024 --variants random
    python benchmarks/step.py --shapes 8x512 4x1024 --target-tokens 64 --max-length 1024
    python benchmarks/step.py --shapes 128x32 128x256 --device cuda --dtype bf16

With --data the batches are those that fairseq-train forms of a corpus: sentences of similar length, sources padded on
the left, targets on the right. With --shapes they are random words, all sentences of one length. The loss is
label-smoothed cross-entropy; there is no dropout.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from common import (
    CONVOLUTIONS,
    DTYPES,
    STOCK,
    build_base_model,
    compare_with_stock,
    make_dictionary,
    make_parser,
    parse_shape,
    report,
    set_up_device,
    table_cells,
)
from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.data import Dictionary
from fairseq.optim.adam import Adam
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from rounds import Function
from torch import Tensor, nn

from fairseq_synth.architectures import VARIANTS

LABEL_SMOOTHING = 0.1


class Batch(NamedTuple):
    """A batch of translations, in fairseq's names."""

    src_tokens: Tensor  # (B, S)
    src_lengths: Tensor  # (B,)
    prev_output_tokens: Tensor  # (B, T): the decoder's input
    target: Tensor  # (B, T)


class Trainer:
    """A model with its optimizer."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model = model.to(args.device, DTYPES[args.dtype]).train()
        self.optimizer = Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98))

    def step(self, batch: Batch, padding_index: int) -> None:
        """Updates the model once."""
        self.optimizer.zero_grad(set_to_none=True)
        output = self.model(batch.src_tokens, batch.src_lengths, batch.prev_output_tokens)
        log_probs = self.model.get_normalized_probs(output, log_probs=True)
        loss, _ = label_smoothed_nll_loss(
            log_probs.view(-1, log_probs.size(-1)),
            batch.target.flatten()[:, None],
            LABEL_SMOOTHING,
            ignore_index=padding_index,
        )
        loss.backward()
        trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        nn.utils.clip_grad_norm_(trained, 1.0)
        self.optimizer.step()

    def make_round(self, batches: Sequence[Batch], padding_index: int) -> Function:
        """Returns a function that updates the model once on each batch."""

        def update_on_all() -> None:
            """Updates the model once on each batch."""
            for batch in batches:
                self.step(batch, padding_index)

        return update_on_all


def make_random_batch(shape: str, args: argparse.Namespace) -> Batch:
    """Returns a batch of random words. `shape` is sentences x tokens; targets are cut to ``--target-tokens``."""
    sentences, length = parse_shape(shape)
    torch.manual_seed(0)
    first_word = 4  # after the special entries of the vocabulary
    source, target = torch.randint(first_word, args.words, (2, sentences, length), device=args.device)
    target = target[:, : args.target_tokens]
    lengths = torch.full((sentences,), length, device=args.device)
    return Batch(src_tokens=source, src_lengths=lengths, prev_output_tokens=target, target=target)


class Corpus(NamedTuple):
    """Batches of a training set, with its vocabulary."""

    dictionary: Dictionary
    batches: list[Batch]


def load_corpus(args: argparse.Namespace) -> Corpus:
    """Returns ``--batches`` batches of the training set of ``--data``, spread over a shuffled epoch."""
    config = TranslationConfig(
        data=args.data,
        dataset_impl="mmap",
        # Hydra would fill these in
        train_subset="train",
        required_seq_len_multiple=1,
    )
    task = TranslationTask.setup_task(config)
    task.load_dataset("train")
    iterator = task.get_batch_iterator(task.dataset("train"), max_tokens=args.max_tokens, seed=1)
    samples: list[Any] = list(iterator.next_epoch_itr(shuffle=True))
    distance = max(1, len(samples) // args.batches)
    chosen = samples[::distance][: args.batches]
    if args.device == "cuda":
        chosen = [utils.move_to_cuda(sample) for sample in chosen]
    batches = []
    for sample in chosen:
        inputs = sample["net_input"]
        batches.append(
            Batch(inputs["src_tokens"], inputs["src_lengths"], inputs["prev_output_tokens"], sample["target"])
        )
    return Corpus(task.source_dictionary, batches)


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line. Ends with a one-line error if they contradict each other."""
    parser = make_parser(__doc__, [*VARIANTS, *CONVOLUTIONS], rounds=5)
    parser.add_argument("--data", help="a corpus as fairseq-preprocess writes it, with a joined dictionary")
    parser.add_argument(
        "--max-tokens", type=int, default=1024, help="tokens in a batch of --data, as fairseq-train counts them"
    )
    parser.add_argument("--batches", type=int, default=6, help="batches of --data in a round")
    parser.add_argument("--shapes", nargs="+", help="sentences x tokens, source and target (default: 32x32 4x256)")
    parser.add_argument(
        "--target-tokens", type=int, metavar="N", help="tokens of a target, with --shapes (default: as the source)"
    )
    parser.add_argument("--max-length", type=int, default=256, help="--synth-max-length")
    parser.add_argument("--words", type=int, default=32768, help="size of the vocabulary, with --shapes")
    args = parser.parse_args()
    set_up_device(args)
    if args.data and args.shapes:
        sys.exit("error: --data and --shapes: give one of them")
    return args


def main() -> None:
    """Compares the training steps of all variants with stock fairseq's."""
    args = parse_flags()
    batches_by_column: dict[str, list[Batch]] = {}
    if args.data:
        dictionary, batches = load_corpus(args)
        batches_by_column[f"{args.max_tokens} tokens"] = batches
    else:
        dictionary = make_dictionary(args.words)
        for shape in args.shapes or ["32x32", "4x256"]:
            batches_by_column[shape] = [make_random_batch(shape, args)]
    rows: dict[str, dict[str, float]] = {}
    stock = Trainer(build_base_model(STOCK, dictionary, args.max_length), args)
    for name in args.variants:  # two models at a time, as all of them together need 15 GB
        variant = Trainer(build_base_model(name, dictionary, args.max_length), args)
        rows[name] = {}
        for column, batches in batches_by_column.items():
            rounds = {
                STOCK: stock.make_round(batches, dictionary.pad()),
                name: variant.make_round(batches, dictionary.pad()),
            }
            comparison = compare_with_stock(rounds, args.device, args.rounds)[name]
            rows[name].update(table_cells(column, comparison))
        print(name, rows[name], file=sys.stderr, flush=True)
    batches_text = "batches of a corpus" if args.data else "one length"
    title = f"training step of the base model, {batches_text}, l = {args.max_length}"
    report(title, "stock's time / this one's", rows, args)


if __name__ == "__main__":
    main()
