"""Measures what the attention of a Transformer or Synthesizer has learned, and draws pictures of the results.

Without --data, the command shows histograms of the parameters, the weights alpha of mixtures, and the attention
patterns of functions that never look at the input. With --data, it also performs the measurements that are listed
below. Each picture shows all models that have the same number of layers and heads. The file figures.json contains all
numbers that the pictures show. If the command is interrupted, the results of completed measurements are kept.
"""

# Neither torch nor fairseq is imported here, which would take seconds, so that --help and errors come at once.
import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import SynthesizerError

RESULTS_FILE = "figures.json"
AVERAGED_SENTENCES = 2000  # by default, attention is averaged over at most this number of sentences
DATA_FLAGS = ("only", "subset", "sentences", "steps", "beam", "remove_bpe")  # which have no effect without --data


class PartDescription(NamedTuple):
    """What --help says of a part of an inspection on data."""

    content: str  # what the part measures
    cost: str  # how much it computes for any model


# The parts that --only may choose. `analysis` has the function that measures each of them.
PARTS = {
    "attention": PartDescription(
        content="logits, attention weights and their singular values",
        cost="3 passes over the sentences",
    ),
    "layers": PartDescription(
        content="rank of the layers",
        cost="8 passes over 64 sentences",
    ),
    "heads": PartDescription(
        content="importance of heads; loss and BLEU when heads are removed",
        cost="one pass per head, and up to --steps translations per kind of attention; the slowest measurement",
    ),
    "words": PartDescription(
        content="loss when the attention of a head depends only on positions",
        cost=(
            f"one pass over up to {AVERAGED_SENTENCES:,} sentences of the training split, then two passes per head "
            "of self-attention"
        ),
    ),
    "lengths": PartDescription(
        content="loss and BLEU by sentence length",
        cost="one pass, and one translation",
    ),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the values of the command line's flags.

    Raises:
        SynthesizerError: a flag needs --data, which is missing.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.data is None:
        check_no_data_is_needed(parser, args)
    return args


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fairseq_synth.inspect",
        description=f"{__doc__}\n{describe_parts()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="a .pt file of fairseq-train")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="write the results to this new folder")
    parser.add_argument("--user-dir", type=Path, metavar="DIR", help="the --user-dir with which the model was trained")
    parser.add_argument("--data", type=Path, metavar="BIN", help="binarised data with the dictionaries of the models")
    parser.add_argument(
        "--only",
        type=parse_part_names,
        metavar="PARTS",
        help="only these measurements, separated by commas, as in attention,lengths (default: all)",
    )
    parser.add_argument("--subset", default="valid", help="split of the data (default: valid)")
    parser.add_argument(
        "--sentences",
        type=parse_positive,
        metavar="N",
        help=(
            "use only the first N sentences of each split "
            f"(default: all sentences of --subset, and {AVERAGED_SENTENCES:,} training sentences)"
        ),
    )
    parser.add_argument(
        "--positions", type=parse_positive, default=32, metavar="N", help="positions shown in patterns (default: 32)"
    )
    parser.add_argument(
        "--steps", type=parse_positive, default=8, metavar="N", help="steps in which heads are removed (default: 8)"
    )
    parser.add_argument("--beam", type=parse_positive, default=1, metavar="N", help="beam size for BLEU (default: 1)")
    parser.add_argument(
        "--remove-bpe",
        default="subword_nmt",
        metavar="KIND",
        help="kind of subwords, as in fairseq-generate: subword_nmt (default), sentencepiece, …",
    )
    parser.add_argument(
        "--no-pictures", dest="pictures", action="store_false", help=f"write only {RESULTS_FILE}, without matplotlib"
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help=(
            f"write a smaller {RESULTS_FILE}, with coarser histograms and smaller patterns, as for this project's "
            "documentation"
        ),
    )
    return parser


def describe_parts() -> str:
    """Returns a text for --help that says for each part what it measures and how much it computes."""
    lines = ["measurements, and how long each takes:"]
    for name, part in PARTS.items():
        lines.append(f"  {name:10} {part.content}:")
        lines.append(f"  {'':10} {part.cost}")
    return "\n".join(lines)


def check_no_data_is_needed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Checks that a command without --data has no flag that has an effect with --data only.

    Raises:
        SynthesizerError: it has one.
    """
    if args.summary:
        raise SynthesizerError("--summary: works only with --data; add --data BIN, or remove --summary")
    flags = list_changed_flags(parser, args, DATA_FLAGS)
    if flags:
        raise SynthesizerError(f"{' '.join(flags)}: works only with --data; add --data BIN, or remove the flag")


def list_changed_flags(parser: argparse.ArgumentParser, args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Returns the flags that have another value than their default, as they are written on the command line.

    Args:
        parser: has the defaults.
        args: has the values.
        names: the flags to look at, as attributes of `args`.
    """
    flags = []
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            flags.append(f"--{name.replace('_', '-')}")
    return flags


def parse_part_names(text: str) -> tuple[str, ...]:
    """Returns the names of parts in the value of --only, which joins them by commas."""
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(PARTS)}, separated by commas")
    return names


def parse_positive(text: str) -> int:
    """Returns the value of a flag as a number, which has to be at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number
