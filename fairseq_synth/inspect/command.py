"""Figures and pictures of what attention has learned, of any Transformer, Synthesizer or mixture of fairseq.

Without --data: histograms of parameters, the weights alpha of mixtures, patterns of functions that never look at the
input. With the model's binarised data also the parts that are listed below. Each picture shows all models; models
whose layers or heads differ in number have pictures of their own. OUT/figures.json has every figure that a picture
shows. If the command is interrupted or fails, the files of the parts that are finished stay in OUT.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import SynthesizerError
from .analysis import PARTS, begin
from .checkpoints import import_user_dir, load
from .output import OutputFolder, output_folder
from .pictures import titled_pictures
from .subject import Options, Subject
from .summary import summarise

FIGURES = "figures.json"
DATA_FLAGS = ("only", "subset", "sentences", "steps", "beam", "remove_bpe")
INTERRUPTED = 130  # exit status of a command that Ctrl-C ends


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
        SynthesizerError: a checkpoint, the data or --out cannot be used.
    """
    args = parse(argv)
    if args.pictures:
        check_matplotlib()
    import_user_dir(args)
    with output_folder(args.out) as output:
        subjects = load_subjects(args)
        write(args, output, subjects)
        if args.data is not None:
            measure_parts(args, output, subjects)
        for name in output.names():
            print(args.out / name)


def load_subjects(args: argparse.Namespace) -> dict[str, Subject]:
    """Loads all checkpoints, and measures what every inspection has; returns {label: subject}."""
    options = Options(
        parts=args.only or tuple(PARTS),
        subset=args.subset,
        sentences=args.sentences,
        positions=args.positions,
        steps=args.steps,
        beam=args.beam,
        remove_bpe=args.remove_bpe,
    )
    subjects = {}
    for label, path in zip(labels(args.checkpoints), args.checkpoints):
        subjects[label] = begin(load(path, args.data), options)
    return subjects


def measure_parts(args: argparse.Namespace, output: OutputFolder, subjects: dict[str, Subject]) -> None:
    """Measures one part after the other for all models, and writes the files of each part once it is finished."""
    parts = args.only or tuple(PARTS)
    for number, name in enumerate(parts):
        with reporting_what_stays(args.out, finished=parts[:number], unfinished=parts[number:]):
            for label, subject in subjects.items():
                announce(label, name, subject)
                PARTS[name].measure(subject)
            write(args, output, subjects)


def announce(label: str, part: str, subject: Subject) -> None:
    """Prints what a part measures and what it costs."""
    cost = PARTS[part].cost(subject)
    sentences = len(subject.order)
    text = f"{label}: {part}: {cost} (one pass over {sentences:,} sentences took {subject.pass_seconds:.1f} s)"
    print(text, file=sys.stderr)


@contextlib.contextmanager
def reporting_what_stays(out: Path, finished: Sequence[str], unfinished: Sequence[str]) -> Iterator[None]:
    """Says what stays in a folder if the body fails, or if the user interrupts it, which then ends the command.

    Args:
        out: the folder.
        finished: the parts whose files are complete.
        unfinished: the part that the body measures, and those after it.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted in {unfinished[0]}; {describe_rest(out, finished, unfinished)}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception:
        print(f"failed in {unfinished[0]}; {describe_rest(out, finished, unfinished)}", file=sys.stderr)
        raise


def describe_rest(out: Path, finished: Sequence[str], unfinished: Sequence[str]) -> str:
    """Returns which parts are in a folder, and how to measure the others."""
    done = f"the finished parts {', '.join(finished)}" if finished else "what is measured before the first part"
    return f"{out} has {done}; for the rest give --only {','.join(unfinished)} and another --out"


def write(args: argparse.Namespace, output: OutputFolder, subjects: dict[str, Subject]) -> None:
    """Writes the figures that are measured so far, and those of their pictures that have changed."""
    figures = {label: subject.figures for label, subject in subjects.items()}
    if args.pictures:
        for picture in titled_pictures(figures):
            output.write_picture(picture)
    if args.summary:
        summaries = {label: summarise(model_figures) for label, model_figures in figures.items()}
        output.write_json(FIGURES, summaries)
    else:
        output.write_json(FIGURES, figures)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line's values.

    Raises:
        SynthesizerError: a flag needs --data, which is missing.
    """
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
        type=part_names,
        metavar="PARTS",
        help="measure only these parts, joined by commas, as in attention,lengths (default: all)",
    )
    parser.add_argument("--subset", default="valid", help="split of the data (default: valid)")
    parser.add_argument(
        "--sentences",
        type=positive,
        metavar="N",
        help="read only the first N sentences, and at most N of the training split (default: all, and 2,000)",
    )
    parser.add_argument(
        "--positions", type=positive, default=32, metavar="N", help="size of the patterns shown (default: 32)"
    )
    parser.add_argument(
        "--steps", type=positive, default=8, metavar="N", help="steps from all heads to none (default: 8)"
    )
    parser.add_argument("--beam", type=positive, default=1, metavar="N", help="beam of translations (default: 1)")
    parser.add_argument(
        "--remove-bpe",
        default="subword_nmt",
        metavar="KIND",
        help="subwords to join before BLEU, as in fairseq-generate: subword_nmt (default), sentencepiece, …",
    )
    parser.add_argument(
        "--no-pictures", dest="pictures", action="store_false", help=f"write {FIGURES} alone; needs no matplotlib"
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help=f"keep in {FIGURES} only what the project's page of results shows: coarser histograms, smaller patterns",
    )
    args = parser.parse_args(argv)
    if args.data is None:
        check_no_data_is_needed(parser, args)
    return args


def describe_parts() -> str:
    """Returns what each part measures and costs, for --help."""
    lines = ["parts, and what each costs:"]
    for name, part in PARTS.items():
        lines.append(f"  {name:10} {part.content}:")
        lines.append(f"  {'':10} {part.cost_in_general}")
    return "\n".join(lines)


def check_no_data_is_needed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Checks the flags of a command without --data.

    Raises:
        SynthesizerError: a flag has an effect with --data only.
    """
    if args.summary:
        raise SynthesizerError("--summary: of figures that are measured on data; give --data BIN, or leave it out")
    flags = list_changed_flags(parser, args, DATA_FLAGS)
    if flags:
        raise SynthesizerError(f"{' '.join(flags)}: measured on data; give --data BIN, or leave it out")


def list_changed_flags(parser: argparse.ArgumentParser, args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Returns those flags, as the command line writes them, whose values are not their defaults."""
    flags = []
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            flags.append(f"--{name.replace('_', '-')}")
    return flags


def part_names(text: str) -> tuple[str, ...]:
    """Returns names of parts from a text that joins them by commas."""
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(PARTS)}, separated by commas")
    return names


def positive(text: str) -> int:
    """Returns a whole number above 0 from a text."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def check_matplotlib() -> None:
    """Checks that pictures can be drawn, before anything is computed.

    Raises:
        SynthesizerError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SynthesizerError(
            "pictures need matplotlib: pip install matplotlib; or give --no-pictures for the figures alone"
        ) from error


def labels(paths: Sequence[Path]) -> list[str]:
    """Returns a short name for each checkpoint: the shortest kind of name that differs for all of them.

    It is the file's name, or else the folder's and the file's, or else these two and a number.
    """
    file_names = [path.stem for path in paths]
    if len(set(file_names)) == len(paths):
        return file_names
    folder_names = [f"{path.absolute().parent.name}-{path.stem}" for path in paths]
    if len(set(folder_names)) == len(paths):
        return folder_names
    return [f"{name}-{number}" for number, name in enumerate(folder_names, start=1)]
