"""Beam search: tokens a second of each variant over stock fairseq's.

    python benchmarks/generate.py --words 32768 --tokens 64
    python benchmarks/generate.py --checkpoints transformer/avg.pt random/avg.pt --data data-bin

Without --checkpoints the base model with random weights writes sentences of exactly --tokens tokens: the time
does not depend on the weights. With them the first is the baseline, and each translates the test set of --data as
fairseq-generate does; tokens are those that it writes, which may differ between models.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from common import (
    DTYPES,
    STOCK,
    build_base_model,
    compare_with_stock,
    make_dictionary,
    make_parser,
    report,
    set_up_device,
)
from fairseq import checkpoint_utils, utils
from fairseq.sequence_generator import SequenceGenerator
from rounds import Function

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.inspect.command import labels, list_changed_flags

MAX_LENGTH = 256  # ℓ of the base model


class RandomModel:
    """The base model with random weights, which translates one batch of random words."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        model = build_base_model(name, make_dictionary(args.words), MAX_LENGTH)
        model = model.to(args.device, DTYPES[args.dtype]).eval()
        model.make_generation_fast_()
        self.generator = SequenceGenerator(
            [model],
            model.decoder.dictionary,
            beam_size=args.beam,
            max_len_a=0,
            max_len_b=args.tokens,
            min_len=args.tokens,
        )
        self.sample = {"net_input": make_random_source(args)}
        self.number_of_tokens = args.sentences * args.tokens

    def translate(self) -> None:
        """Searches for the translations of the batch."""
        with torch.no_grad():
            self.generator.forward(self.sample)


def make_random_source(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Returns the source of a batch of random words, the same in every call, in fairseq's names."""
    torch.manual_seed(0)
    first_word = 4  # after the special entries of the vocabulary
    size = (args.sentences, args.source_tokens)
    return {
        "src_tokens": torch.randint(first_word, args.words, size, device=args.device),
        "src_lengths": torch.full((args.sentences,), args.source_tokens, device=args.device),
    }


class Checkpoint:
    """A trained model, which translates the test set of ``--data``."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        models, config, self.task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides={"data": str(args.data)}
        )
        self.task.load_dataset("test")
        self.model = models[0].to(args.device, DTYPES[args.dtype]).eval()
        self.model.prepare_for_inference_(config)
        self.generator = self.task.build_generator([self.model], config.generation)
        self.generator.beam_size = args.beam
        iterator = self.task.get_batch_iterator(self.task.dataset("test"), max_tokens=4096)
        self.batches: list[Any] = list(iterator.next_epoch_itr(shuffle=False))
        if args.device == "cuda":
            self.batches = [utils.move_to_cuda(batch) for batch in self.batches]
        self.number_of_tokens = 0  # of the last translation of the test set

    def translate(self) -> None:
        """Searches for the translations of the test set, and counts their tokens."""
        self.number_of_tokens = 0
        for batch in self.batches:
            for hypotheses in self.task.inference_step(self.generator, [self.model], batch):
                best = hypotheses[0]
                self.number_of_tokens += len(best["tokens"])


def load_checkpoints(args: argparse.Namespace) -> dict[str, Checkpoint]:
    """Returns {name: checkpoint}; the first one is called ``stock``, as it is the baseline."""
    names = [STOCK, *labels(args.checkpoints)[1:]]
    if STOCK in names[1:]:
        sys.exit(f"error: --checkpoints: one after the first is called {STOCK}, as the baseline is; rename it")
    return {name: Checkpoint(path, args) for name, path in zip(names, args.checkpoints)}


def compare_translations(
    models: Mapping[str, RandomModel] | Mapping[str, Checkpoint], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Returns {name: the ratio of its tokens a second to stock's, with the lowest and highest round}."""
    functions: dict[str, Function] = {name: model.translate for name, model in models.items()}
    rows = {}
    for name, comparison in compare_with_stock(functions, args.device, args.rounds).items():
        share_of_tokens = models[name].number_of_tokens / models[STOCK].number_of_tokens
        rows[name] = {
            "ratio": comparison.ratio * share_of_tokens,
            "lowest": comparison.lowest * share_of_tokens,
            "highest": comparison.highest * share_of_tokens,
        }
    return rows


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line. Ends with a one-line error if they contradict each other."""
    parser = make_parser(__doc__, list(VARIANTS), rounds=3)
    parser.add_argument("--words", type=int, default=32768, help="size of the vocabulary")
    parser.add_argument("--tokens", type=int, default=64, help="length of every translation")
    parser.add_argument("--source-tokens", type=int, default=32)
    parser.add_argument("--sentences", type=int, default=32, help="in a batch")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--checkpoints", nargs="+", type=Path, help="trained models, the baseline first")
    parser.add_argument("--data", type=Path, help="their data-bin folder")
    args = parser.parse_args()
    set_up_device(args)
    if bool(args.checkpoints) != bool(args.data):
        sys.exit("error: --checkpoints and --data go together")
    settings_of_a_random_model = ("variants", "words", "tokens", "source_tokens", "sentences")
    ignored = list_changed_flags(parser, args, settings_of_a_random_model)
    if args.checkpoints and ignored:
        sys.exit(f"error: {' '.join(ignored)}: not for --checkpoints, which translate a test set; leave them out")
    return args


def main() -> None:
    """Compares the beam search of all variants, or of some checkpoints, with stock fairseq's."""
    args = parse_flags()
    if args.checkpoints:
        rows = compare_translations(load_checkpoints(args), args)
        models_text = "trained models"
    else:
        rows = compare_translations({name: RandomModel(name, args) for name in [STOCK, *args.variants]}, args)
        models_text = f"{args.tokens} tokens, {args.words} words"
    report(f"beam search, beam {args.beam}, {models_text}", "tokens a second / stock's", rows, args)


if __name__ == "__main__":
    main()
