"""Pictures and figures of what attention has learned, of any Transformer, Synthesizer or mixture of fairseq.

Without --data: histograms of parameters, the weights alpha of mixtures, patterns of functions that never look at the
input. With the model's binarised data also: logits and attention weights, patterns by position and of single
sentences, singular values, rank of the layers, importance of heads, loss and BLEU without them and by sentence length.
Each picture shows all models; models whose layers or heads differ in number have pictures of their own.
OUT/figures.json has every figure that a picture shows. Nothing is left in OUT if the command fails.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import SynthesizerError
from . import pictures
from .analysis import PARTS, Options, analyse, summary
from .checkpoints import import_user_dir, load

FIGURES = "figures.json"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line.

    Raises:
        SynthesizerError: a checkpoint, the data or --out cannot be used.
    """
    args = parse(argv)
    if not args.no_pictures:
        check_matplotlib()
    import_user_dir(args)
    if args.summary and args.data is None:
        raise SynthesizerError("--summary: of figures that are measured on data; give --data BIN, or leave it out")
    if args.data is None and args.of_data:
        raise SynthesizerError(f"{' '.join(args.of_data)}: measured on data; give --data BIN, or leave it out")
    options = Options(
        args.only or tuple(PARTS), args.subset, args.sentences, args.positions, args.steps, args.beam, args.remove_bpe
    )
    with whole_folder(args.out) as folder:
        found = {}
        for label, path in zip(labels(args.checkpoints), args.checkpoints):
            print(f"{path}:", file=sys.stderr)
            found[label] = analyse(load(path, args.data), options)
        if not args.no_pictures:
            pictures.save(found, folder)
        found = {label: summary(own) if args.summary else own for label, own in found.items()}
        (folder / FIGURES).write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
        names = sorted(path.name for path in folder.iterdir())
    print(*(args.out / name for name in names), sep="\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's values."""
    parser = argparse.ArgumentParser(
        prog="python -m fairseq_synth.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="a .pt file of fairseq-train")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder to make")
    parser.add_argument("--user-dir", type=Path, metavar="DIR", help="the --user-dir given to fairseq-train")
    parser.add_argument("--data", type=Path, metavar="BIN", help="binarised data of the models' dictionaries")
    parser.add_argument(
        "--only",
        type=parts,
        metavar="PARTS",
        help="with --data, measure only one or several of " + ", ".join(f"{p} ({what})" for p, what in PARTS.items()),
    )
    parser.add_argument("--subset", default="valid", help="split of the data (default: valid)")
    parser.add_argument("--sentences", type=positive, metavar="N", help="only the first N sentences (default: all)")
    parser.add_argument(
        "--positions", type=positive, default=32, metavar="N", help="size of the patterns shown (default: 32)"
    )
    parser.add_argument(
        "--steps", type=positive, default=8, metavar="N", help="steps from all heads to none (default: 8)"
    )
    parser.add_argument("--beam", type=positive, default=1, metavar="N", help="of the translations (default: 1)")
    parser.add_argument(
        "--remove-bpe",
        default="subword_nmt",
        metavar="KIND",
        help="subwords to join before BLEU, as of fairseq-generate: subword_nmt (default), sentencepiece, …",
    )
    parser.add_argument("--no-pictures", action="store_true", help=f"{FIGURES} alone; needs no matplotlib")
    parser.add_argument(
        "--summary",
        action="store_true",
        help=f"in {FIGURES} only what docs/analysis.md shows: coarser histograms, the corner of the patterns",
    )
    args = parser.parse_args(argv)
    args.of_data = given(parser, args, "only", "subset", "sentences", "steps", "beam", "remove_bpe")
    return args


def given(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> list[str]:
    """Those of some flags that have another value than their default."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) != parser.get_default(name)]


def parts(text: str) -> tuple[str, ...]:
    """Names of parts, separated by commas."""
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(PARTS)}, separated by commas")
    return names


def positive(text: str) -> int:
    """A whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def check_matplotlib() -> None:
    """Raises SynthesizerError where there is no matplotlib, before anything is computed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SynthesizerError(
            "pictures need matplotlib: pip install matplotlib; or give --no-pictures for the figures alone"
        ) from error


def labels(paths: Sequence[Path]) -> list[str]:
    """A short name for each checkpoint: its file's, with its folder's where they share one, or with a number."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.absolute().parent.name}-{path.stem}" for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name}-{i + 1}" for i, name in enumerate(names)]
    return names


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it when the body has ended, and is removed if it fails.

    Raises:
        SynthesizerError: `out` holds something, or cannot be made.
    """
    try:
        out = out.resolve()  # a link to an empty folder stays
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise SynthesizerError(f"--out {out}: exists already; remove it, or choose another folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise SynthesizerError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from error
    try:
        yield folder
        folder.chmod(0o755)
        os.replace(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
