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
    FIRST_WORD,
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

    def __init__(self, model: nn.Module, padding_index: int, args: argparse.Namespace) -> None:
        """Prepares a model for training.

        Args:
            model: is moved to the device and dtype of `args`, in training mode.
            padding_index: the index of padding in the vocabulary.
            args: the command line's flags.
        """
        self.model = model.to(args.device, DTYPES[args.dtype]).train()
        self.padding_index = padding_index
        self.optimizer = Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98))

    def step(self, batch: Batch) -> None:
        """Updates the model once."""
        self.optimizer.zero_grad(set_to_none=True)
        output = self.model(batch.src_tokens, batch.src_lengths, batch.prev_output_tokens)
        log_probs = self.model.get_normalized_probs(output, log_probs=True)  # (B, T, words)
        # fairseq's loss takes one row for each of the B T tokens.
        loss, _ = label_smoothed_nll_loss(
            log_probs.flatten(0, 1),  # (B T, words)
            batch.target.flatten().unsqueeze(1),  # (B T, 1)
            LABEL_SMOOTHING,
            ignore_index=self.padding_index,
        )
        loss.backward()
        # A parameter that has no part in the output has no gradient.
        with_gradient = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        nn.utils.clip_grad_norm_(with_gradient, max_norm=1.0)
        self.optimizer.step()

    def make_round(self, batches: Sequence[Batch]) -> Function:
        """Returns a function that updates the model once on each batch."""

        def update_on_all() -> None:
            """Updates the model once on each batch."""
            for batch in batches:
                self.step(batch)

        return update_on_all


class Corpus(NamedTuple):
    """Batches of translations, by the columns of the table in which they are timed, and their vocabulary."""

    dictionary: Dictionary
    batches_by_column: dict[str, list[Batch]]


def make_random_batch(shape: str, args: argparse.Namespace) -> Batch:
    """Returns a batch of translations of random words, which are all of one length.

    Args:
        shape: sentences x tokens, of the sources.
        args: the command line's flags. With ``--target-tokens`` the targets are shorter than the sources.
    """
    sentences, length = parse_shape(shape)
    torch.manual_seed(0)
    size = (2, sentences, length)  # 2: source and target
    words = torch.randint(low=FIRST_WORD, high=args.words, size=size, device=args.device)
    source, whole_target = words.unbind()  # each (sentences, length)
    target = whole_target[:, : args.target_tokens]  # all of it if the flag is None
    lengths = torch.full((sentences,), length, device=args.device)
    # In a training, the decoder's input would be the target shifted by one token, which takes the same time.
    return Batch(src_tokens=source, src_lengths=lengths, prev_output_tokens=target, target=target)


def make_random_corpus(args: argparse.Namespace) -> Corpus:
    """Returns a batch of random words for each of ``--shapes``, each in a column of its own."""
    batches_by_column = {}
    for shape in args.shapes or ["32x32", "4x256"]:
        batches_by_column[shape] = [make_random_batch(shape, args)]
    return Corpus(make_dictionary(args.words), batches_by_column)


def load_corpus(args: argparse.Namespace) -> Corpus:
    """Returns ``--batches`` batches of the training set of ``--data``, which are timed together.

    They are evenly spaced in an epoch whose batches are shuffled. Their times are one column of the printed table.
    """
    config = TranslationConfig(
        data=args.data,
        dataset_impl="mmap",
        # fairseq-train takes the following values from the other parts of its configuration.
        train_subset="train",
        required_seq_len_multiple=1,
    )
    task = TranslationTask.setup_task(config)
    task.load_dataset("train")
    iterator = task.get_batch_iterator(task.dataset("train"), max_tokens=args.max_tokens, seed=1)
    samples: list[Any] = list(iterator.next_epoch_itr(shuffle=True))
    distance = max(1, len(samples) // args.batches)
    evenly_spaced_samples = samples[::distance]  # may be more than asked for, because the distance is rounded down
    chosen_samples = evenly_spaced_samples[: args.batches]
    if args.device == "cuda":
        chosen_samples = [utils.move_to_cuda(sample) for sample in chosen_samples]
    batches = [read_sample(sample) for sample in chosen_samples]
    heading_of_column = f"{args.max_tokens} tokens"
    return Corpus(task.source_dictionary, {heading_of_column: batches})


def read_sample(sample: Any) -> Batch:
    """Returns a batch from the nested dictionaries in which fairseq has it."""
    inputs = sample["net_input"]
    return Batch(
        src_tokens=inputs["src_tokens"],
        src_lengths=inputs["src_lengths"],
        prev_output_tokens=inputs["prev_output_tokens"],
        target=sample["target"],
    )


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
    """Compares the training steps of all variants with stock fairseq's, and prints a table."""
    args = parse_flags()
    corpus = load_corpus(args) if args.data else make_random_corpus(args)
    stock = make_trainer(STOCK, corpus, args)
    rows: dict[str, dict[str, float]] = {}
    for name in args.variants:
        rows[name] = compare_variant(stock, name, corpus, args)
        print(name, rows[name], file=sys.stderr, flush=True)  # the final table comes much later
    batches_text = "batches of a corpus" if args.data else "one length"
    title = f"training step of the base model, {batches_text}, l = {args.max_length}"
    report(title, "stock's time / this one's", rows, args)


def make_trainer(name: str, corpus: Corpus, args: argparse.Namespace) -> Trainer:
    """Builds the base model of stock fairseq or of a variant, with an optimizer."""
    model = build_base_model(name, corpus.dictionary, args.max_length)
    return Trainer(model, corpus.dictionary.pad(), args)


def compare_variant(stock: Trainer, name: str, corpus: Corpus, args: argparse.Namespace) -> dict[str, float]:
    """Times stock fairseq and a variant in turns, and returns the variant's row of the table: {heading: value}.

    Args:
        stock: stock fairseq.
        name: the name of the variant.
        corpus: the batches by the columns of the table. In a round, each model is updated on all batches of a column.
        args: the command line's flags.
    """
    # The variant's model exists only during this call, because the models of all variants would need 15 GB.
    variant = make_trainer(name, corpus, args)
    row: dict[str, float] = {}
    for heading, batches in corpus.batches_by_column.items():
        functions = {STOCK: stock.make_round(batches), "variant": variant.make_round(batches)}
        comparisons = compare_with_stock(functions, args.device, args.rounds)
        row.update(table_cells(heading, comparisons["variant"]))
    return row


if __name__ == "__main__":
    main()
