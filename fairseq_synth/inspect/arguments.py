"""Figures and pictures of what attention has learned, of any Transformer, Synthesizer or mixture of fairseq.

Without --data: histograms of parameters, the weights alpha of mixtures, patterns of functions that never look at the
input. With the model's binarised data also the parts that are listed below. Each picture shows all models; models
whose layers or heads differ in number have pictures of their own. OUT/figures.json has every figure that a picture
shows. If the command is interrupted or fails, the files of the parts that are finished stay in OUT.
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
        content="importance of heads, loss and BLEU without them",
        cost="a pass for each head, and up to --steps translations for each kind of attention; the slowest part",
    ),
    "words": PartDescription(
        content="loss with heads that look by position alone",
        cost=(
            f"a pass over up to {AVERAGED_SENTENCES:,} sentences of the training split, then two passes for each head "
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
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder to make")
    parser.add_argument("--user-dir", type=Path, metavar="DIR", help="the --user-dir given to fairseq-train")
    parser.add_argument("--data", type=Path, metavar="BIN", help="binarised data of the models' dictionaries")
    parser.add_argument(
        "--only",
        type=parse_part_names,
        metavar="PARTS",
        help="measure only these parts, joined by commas, as in attention,lengths (default: all)",
    )
    parser.add_argument("--subset", default="valid", help="split of the data (default: valid)")
    parser.add_argument(
        "--sentences",
        type=parse_positive,
        metavar="N",
        help=(
            "read only the first N sentences, and at most N of the training split "
            f"(default: all, and {AVERAGED_SENTENCES:,})"
        ),
    )
    parser.add_argument(
        "--positions", type=parse_positive, default=32, metavar="N", help="size of the patterns shown (default: 32)"
    )
    parser.add_argument(
        "--steps", type=parse_positive, default=8, metavar="N", help="steps from all heads to none (default: 8)"
    )
    parser.add_argument("--beam", type=parse_positive, default=1, metavar="N", help="beam of translations (default: 1)")
    parser.add_argument(
        "--remove-bpe",
        default="subword_nmt",
        metavar="KIND",
        help="subwords to join before BLEU, as in fairseq-generate: subword_nmt (default), sentencepiece, …",
    )
    parser.add_argument(
        "--no-pictures", dest="pictures", action="store_false", help=f"write {RESULTS_FILE} alone; needs no matplotlib"
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help=(
            f"keep in {RESULTS_FILE} only what the project's page of results shows: coarser histograms, smaller "
            "patterns"
        ),
    )
    return parser


def describe_parts() -> str:
    """Returns a text for --help that says for each part what it measures and how much it computes."""
    lines = ["parts, and what each costs:"]
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
        raise SynthesizerError("--summary: of figures that are measured on data; give --data BIN, or leave it out")
    flags = list_changed_flags(parser, args, DATA_FLAGS)
    if flags:
        raise SynthesizerError(f"{' '.join(flags)}: measured on data; give --data BIN, or leave it out")


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
