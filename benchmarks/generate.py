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
    FIRST_WORD,
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
from rounds import Comparison, Function

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.inspect.arguments import list_changed_flags
from fairseq_synth.inspect.command import checkpoint_labels

MAX_LENGTH = 256  # ℓ of the base model


class RandomModel:
    """The base model with random weights, which translates one batch of random words."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        """Builds the model, and a beam search that writes ``--tokens`` tokens for each sentence.

        Args:
            name: ``stock`` or a variant.
            args: the command line's flags.
        """
        model = build_base_model(name, make_dictionary(args.words), MAX_LENGTH)
        model = model.to(args.device, DTYPES[args.dtype]).eval()
        model.make_generation_fast_()
        self.generator = SequenceGenerator(
            [model],
            model.decoder.dictionary,
            beam_size=args.beam,
            # A translation has at least `min_len` tokens, and at most max_len_a * (length of its source) + max_len_b.
            # With these values, it has exactly `args.tokens` tokens.
            max_len_a=0,
            max_len_b=args.tokens,
            min_len=args.tokens,
        )
        self.sample = {"net_input": make_random_source(args)}
        self.num_tokens = args.sentences * args.tokens

    def translate(self) -> int:
        """Searches for the translations of the batch, and returns how many tokens they have."""
        with torch.no_grad():
            self.generator.forward(self.sample)
        return self.num_tokens


def make_random_source(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Returns ``--sentences`` sentences of ``--source-tokens`` random words, the same in every call.

    Returns:
        ``src_tokens`` (B, S) and ``src_lengths`` (B,), as fairseq's models take them.
    """
    torch.manual_seed(0)
    size = (args.sentences, args.source_tokens)
    return {
        "src_tokens": torch.randint(FIRST_WORD, args.words, size, device=args.device),
        "src_lengths": torch.full((args.sentences,), args.source_tokens, device=args.device),
    }


class Checkpoint:
    """A trained model, which translates the test set of ``--data``."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        """Loads the model, the test set, and the beam search that fairseq-generate would use.

        Args:
            path: the checkpoint.
            args: the command line's flags.
        """
        models, config, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides={"data": str(args.data)}
        )
        self.task = task
        self.model = models[0].to(args.device, DTYPES[args.dtype]).eval()
        self.model.prepare_for_inference_(config)
        self.generator = self.task.build_generator([self.model], config.generation)
        self.generator.beam_size = args.beam  # in place of that in the configuration of the checkpoint
        self.batches = load_test_batches(self.task, args.device)

    def translate(self) -> int:
        """Searches for the translations of the test set, and returns how many tokens they have."""
        num_tokens = 0
        for batch in self.batches:
            for hypotheses in self.task.inference_step(self.generator, [self.model], batch):
                best_hypothesis = hypotheses[0]
                num_tokens += len(best_hypothesis["tokens"])
        return num_tokens


def load_test_batches(task: Any, device: str) -> list[Any]:
    """Returns all batches of a task's test set, on a device, ``cpu`` or ``cuda``."""
    task.load_dataset("test")
    iterator = task.get_batch_iterator(task.dataset("test"), max_tokens=4096)  # the most tokens in a batch
    batches = list(iterator.next_epoch_itr(shuffle=False))
    if device == "cuda":
        batches = [utils.move_to_cuda(batch) for batch in batches]
    return batches


def load_checkpoints(args: argparse.Namespace) -> dict[str, Checkpoint]:
    """Loads the models of ``--checkpoints``, and returns {name: model}.

    The first one is called ``stock``, as it is the baseline; the others have short names from their paths. Ends with a
    one-line error if one of these is called ``stock``, too.
    """
    names = [STOCK, *checkpoint_labels(args.checkpoints)[1:]]
    if STOCK in names[1:]:
        sys.exit(
            f"error: --checkpoints: only the first checkpoint, the baseline, is called {STOCK}; rename the other one"
        )
    return {name: Checkpoint(path, args) for name, path in zip(names, args.checkpoints)}


def compare_translations(
    models: Mapping[str, RandomModel | Checkpoint], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Times the translations of several models in turns, and compares their tokens a second with the baseline's.

    Args:
        models: {name: model}; the baseline is called ``stock``.
        args: the command line's flags.

    Returns:
        {name: {``ratio``, the median over the rounds; ``lowest`` and ``highest``, of a round}}.
    """
    # Each model translates once without being timed. A model writes the same number of tokens each time.
    num_tokens = {name: model.translate() for name, model in models.items()}
    functions: dict[str, Function] = {name: model.translate for name, model in models.items()}
    # The models are warm already, so every round is timed.
    comparisons = compare_with_stock(functions, args.device, args.rounds, warm_up=0)
    rows = {}
    for name, comparison in comparisons.items():
        rows[name] = convert_to_token_rates(comparison, num_tokens[name], baseline_tokens=num_tokens[STOCK])
    return rows


def convert_to_token_rates(comparison: Comparison, tokens: int, baseline_tokens: int) -> dict[str, float]:
    """Returns a model's tokens a second over the baseline's, for a comparison of the times of their translations.

        (tokens / seconds) / (baseline's tokens / baseline's seconds)
        = (baseline's seconds / seconds) * (tokens / baseline's tokens)

    Args:
        comparison: has the baseline's seconds / the model's seconds: their median, lowest and highest value.
        tokens: how many tokens the model writes in this time.
        baseline_tokens: how many tokens the baseline writes.
    """
    ratio_of_tokens = tokens / baseline_tokens
    return {
        "ratio": comparison.ratio * ratio_of_tokens,
        "lowest": comparison.lowest * ratio_of_tokens,
        "highest": comparison.highest * ratio_of_tokens,
    }


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line. Ends with a one-line error if they contradict each other."""
    parser = make_parser(__doc__, list(VARIANTS), rounds=3)
    parser.add_argument("--beam", type=int, default=4)
    # for models with random weights, which translate random sentences
    parser.add_argument("--words", type=int, default=32768, help="size of the vocabulary")
    parser.add_argument("--tokens", type=int, default=64, help="length of every translation")
    parser.add_argument("--source-tokens", type=int, default=32)
    parser.add_argument("--sentences", type=int, default=32, help="in a batch")
    # for trained models, which translate a test set
    parser.add_argument("--checkpoints", nargs="+", type=Path, help="trained models, the baseline first")
    parser.add_argument("--data", type=Path, help="their data-bin folder")
    args = parser.parse_args()
    set_up_device(args)
    has_checkpoints = args.checkpoints is not None
    has_data = args.data is not None
    if has_checkpoints != has_data:
        sys.exit("error: --checkpoints and --data go together")
    if args.checkpoints:
        flags_of_random_models = ("variants", "words", "tokens", "source_tokens", "sentences")
        useless = list_changed_flags(parser, args, flags_of_random_models)
        if useless:
            flags = " ".join(useless)
            sys.exit(f"error: {flags}: --checkpoints translates a test set without these flags; leave them out")
    return args


def main() -> None:
    """Compares the beam search of all variants, or of some checkpoints, with a baseline's, and prints a table."""
    args = parse_flags()
    if args.checkpoints:
        rows = compare_translations(load_checkpoints(args), args)
        models_text = "trained models"
    else:
        random_models = {name: RandomModel(name, args) for name in [STOCK, *args.variants]}
        rows = compare_translations(random_models, args)
        models_text = f"{args.tokens} tokens, {args.words} words"
    report(f"beam search, beam {args.beam}, {models_text}", "tokens a second / stock's", rows, args)


if __name__ == "__main__":
    main()
