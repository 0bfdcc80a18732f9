"""Turns a trained Transformer into a Synthesizer: constants replace the dot products of its self-attention.

For each head, the constants are the logits that best fit the head's attention weights, averaged by position over the
data. The command does not train the model, but it prints a command that does. It converts fairseq's models transformer,
transformer_lm and roberta, and the vanilla heads of this plugin's models. To use NEW.pt, give fairseq the --user-dir of
this plugin.
"""

# Neither torch nor fairseq is imported here, which would take seconds, so that --help and most errors come at once.
import argparse
from collections.abc import Sequence
from pathlib import Path

from ..errors import SynthesizerError
from ..inspect.arguments import AVERAGED_SENTENCES
from ..names import POSITION_FUNCTIONS

STACKS = ("encoder", "decoder")  # there is a flag for each
KEEP = "vanilla"  # the value of the flag of a stack that stays as it is
# The values of --encoder and --decoder. The parameters of the first ones can be computed from attention weights.
CHOICES = (*POSITION_FUNCTIONS, KEEP)
POSITIVE_FLAGS = ("sentences", "rank", "max_length", "heads_within")  # flags whose value must be above 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags of the command line, after checking them.

    Args:
        argv: the words of the command line; None for those of this process.

    Raises:
        SynthesizerError: a value cannot be used, or the output exists or cannot be written.
    """
    parser = argparse.ArgumentParser(prog="python -m fairseq_synth.convert", description=__doc__)
    add_file_flags(parser)
    add_head_flags(parser)
    add_averaging_flags(parser)
    add_size_flags(parser)
    parser.add_argument(
        "--user-dir", type=Path, metavar="DIR", help="your own --user-dir with which the model was trained"
    )
    parser.add_argument("--force", action="store_true", help="overwrite NEW.pt if it exists")
    args = parser.parse_args(argv)
    check_values(args)
    check_place(args.out, may_overwrite=args.force)
    return args


def add_file_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the files that the command reads and writes."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a .pt file of fairseq-train")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DATA_BIN", help="binarised data with the model's dictionaries"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="NEW.pt", help="the new checkpoint")


def add_head_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose which heads are replaced, and by which functions."""
    for stack in STACKS:
        parser.add_argument(
            f"--{stack}",
            metavar="FUNCTION",
            help=f"function for the {stack}'s heads: {', '.join(CHOICES)} (unchanged); default: random",
        )
    parser.add_argument(
        "--layers",
        metavar="NAMES",
        help="convert only these layers, separated by commas, as in encoder.self.0,decoder.self.3 (default: all)",
    )
    parser.add_argument(
        "--heads-within",
        type=float,
        metavar="BITS",
        help="convert as many heads as possible, as long as the loss grows by at most BITS (default: all heads)",
    )


def add_averaging_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose the sentences over which attention is averaged."""
    parser.add_argument(
        "--sentences",
        type=int,
        default=AVERAGED_SENTENCES,
        metavar="N",
        help=f"read at most N sentences of each split (default: {AVERAGED_SENTENCES})",
    )
    parser.add_argument(
        "--subset",
        default="train",
        help="compute the constants from this split (default: train); the loss is always measured on valid",
    )


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that set the sizes of the new functions."""
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="--synth-max-length of the new model (default: the length of the longest sentence that is read)",
    )
    parser.add_argument("--rank", type=int, default=8, metavar="K", help="rank of factorized_random (default: 8)")


def check_values(args: argparse.Namespace) -> None:
    """Checks the numbers and the names of functions on the command line.

    Raises:
        SynthesizerError: a number is not above 0, or a function is not in `CHOICES`.
    """
    for name in POSITIVE_FLAGS:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise SynthesizerError(f"--{name.replace('_', '-')} {value}: must be above 0")
    for stack in STACKS:
        function = getattr(args, stack)  # the flags --encoder and --decoder are named after the stacks
        if function is not None and function not in CHOICES:
            reason = why_no_choice(function)
            raise SynthesizerError(f"--{stack} {function}: {reason}; choose from {', '.join(CHOICES)}")


def why_no_choice(function: str) -> str:
    """Returns why a function is not in `CHOICES`: its parameters cannot be computed, or it does not exist."""
    from ..synthesizers import SYNTHESIZERS  # only now, because it imports torch

    if function in SYNTHESIZERS:
        return "no closed form makes it of attention"
    return "unknown function"


def check_place(out: Path, may_overwrite: bool) -> None:
    """Checks that the new checkpoint can be written, before anything is computed.

    Raises:
        SynthesizerError: the file exists, or its folder does not.
    """
    if out.exists() and not may_overwrite:
        raise SynthesizerError(f"--out {out}: exists already; use --force to overwrite it, or choose another name")
    if not out.absolute().parent.is_dir():
        raise SynthesizerError(f"--out {out}: its folder does not exist; create it, or choose another")
