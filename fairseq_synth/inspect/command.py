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
from .inspection import Inspection, Options
from .output import OutputFolder, output_folder
from .pictures import titled_pictures
from .summary import summarise

RESULTS_FILE = "figures.json"
DATA_FLAGS = ("only", "subset", "sentences", "steps", "beam", "remove_bpe")  # which have no effect without --data
INTERRUPTED = 130  # exit status of a command that Ctrl-C ends


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line: inspects the checkpoints, and writes results and pictures to the folder of --out.

    Raises:
        SynthesizerError: a checkpoint, the data or --out cannot be used.
    """
    args = parse(argv)
    if args.pictures:
        check_matplotlib()
    import_user_dir(args)
    with output_folder(args.out) as output:
        inspections = begin_inspections(args)
        write_files(args, output, inspections)
        if args.data is not None:
            measure_parts(args, output, inspections)
        for name in output.names():
            print(args.out / name)


def begin_inspections(args: argparse.Namespace) -> dict[str, Inspection]:
    """Loads all checkpoints and begins their inspections.

    Returns:
        {label of a checkpoint: its inspection, with the results that do not belong to a part}.
    """
    options = Options(
        parts=chosen_parts(args),
        subset=args.subset,
        sentences=args.sentences,
        positions=args.positions,
        steps=args.steps,
        beam=args.beam,
        remove_bpe=args.remove_bpe,
    )
    inspections = {}
    for label, path in zip(labels(args.checkpoints), args.checkpoints):
        inspections[label] = begin(load(path, args.data), options)
    return inspections


def chosen_parts(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the names of the parts that --only chooses, or of all parts."""
    parts: tuple[str, ...] = args.only or tuple(PARTS)
    return parts


def measure_parts(args: argparse.Namespace, output: OutputFolder, inspections: dict[str, Inspection]) -> None:
    """Measures one part after the other for all models, and writes the files of each part when it is finished."""
    parts = chosen_parts(args)
    for number, part in enumerate(parts):
        with reporting_what_stays(args.out, finished=parts[:number], unfinished=parts[number:]):
            for label, inspection in inspections.items():
                announce(label, part, inspection)
                PARTS[part].measure(inspection)
            write_files(args, output, inspections)


def announce(label: str, part: str, inspection: Inspection) -> None:
    """Prints on standard error how much a part computes for a model, and how long one pass over the data took."""
    cost = PARTS[part].describe_cost(inspection)
    num_sentences = len(inspection.sentence_indices)
    seconds = inspection.pass_seconds
    print(f"{label}: {part}: {cost} (one pass over {num_sentences:,} sentences took {seconds:.1f} s)", file=sys.stderr)


@contextlib.contextmanager
def reporting_what_stays(out: Path, finished: Sequence[str], unfinished: Sequence[str]) -> Iterator[None]:
    """Prints which parts are in the folder of --out if the body fails or the user interrupts it.

    An interruption ends the command here; any other exception goes on.

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
    """Returns a text for the user that says which parts are in a folder, and how to measure the others."""
    content = "what is measured before the first part"
    if finished:
        content = f"the finished parts {', '.join(finished)}"
    return f"{out} has {content}; for the rest give --only {','.join(unfinished)} and another --out"


def write_files(args: argparse.Namespace, output: OutputFolder, inspections: dict[str, Inspection]) -> None:
    """Writes all results that are measured so far, and the pictures that have changed since the last call."""
    results = {label: inspection.results for label, inspection in inspections.items()}
    if args.pictures:
        for picture in titled_pictures(results):
            output.write_picture(picture)
    if args.summary:
        results = {label: summarise(model_results) for label, model_results in results.items()}
    output.write_json(RESULTS_FILE, results)


# ---- flags


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
        help="read only the first N sentences, and at most N of the training split (default: all, and 2,000)",
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
        lines.append(f"  {'':10} {part.cost_in_general}")
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


# ---- what the command needs


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
    """Returns a short name for each checkpoint, of the shortest form in which all names differ.

    The form is the file's name; or, if two files have the same name, the folder's and the file's; or, if these are the
    same too, both and a number.
    """
    file_names = [path.stem for path in paths]
    if len(set(file_names)) == len(paths):
        return file_names
    folder_and_file_names = [f"{path.absolute().parent.name}-{path.stem}" for path in paths]
    if len(set(folder_and_file_names)) == len(paths):
        return folder_and_file_names
    return [f"{name}-{number}" for number, name in enumerate(folder_and_file_names, start=1)]
