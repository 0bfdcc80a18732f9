"""Inspects the checkpoints of a command line, part by part, and writes the results of each part when it is done."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import SynthesizerError
from .analysis import PARTS, begin
from .arguments import RESULTS_FILE
from .checkpoints import import_user_dir, load
from .inspection import Inspection, Options
from .output import OutputFolder, output_folder
from .pictures import titled_pictures
from .summary import summarise

INTERRUPTED = 130  # exit status of a command that Ctrl-C ends


def run(args: argparse.Namespace) -> None:
    """Inspects the checkpoints of the command line, and writes results and pictures to the folder of --out.

    Args:
        args: the flags, as `arguments.parse` returns them.

    Raises:
        SynthesizerError: a checkpoint, the data or --out cannot be used.
    """
    if args.pictures:
        check_matplotlib()
    import_user_dir(args)
    with output_folder(args.out) as output:
        inspections = begin_inspections(args)
        write_files(args, output, inspections)  # the results that belong to no part
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
    for label, path in zip(checkpoint_labels(args.checkpoints), args.checkpoints):
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
        with reporting_what_stays(args.out, part, finished=parts[:number], unfinished=parts[number:]):
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
def reporting_what_stays(out: Path, part: str, finished: Sequence[str], unfinished: Sequence[str]) -> Iterator[None]:
    """Is a context manager that prints which parts are in the folder of --out if its body fails or is interrupted.

    An interruption ends the command here; any other exception goes on.

    Args:
        out: the folder.
        part: the part that the body measures.
        finished: the parts whose files are complete.
        unfinished: this part and those after it.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted in {part}; {describe_rest(out, finished, unfinished)}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception:
        print(f"failed in {part}; {describe_rest(out, finished, unfinished)}", file=sys.stderr)
        raise


def describe_rest(out: Path, finished: Sequence[str], unfinished: Sequence[str]) -> str:
    """Returns a text for the user that says which parts are in a folder, and how to measure the others."""
    content = "what is measured before the first part"
    if finished:
        content = f"the finished parts {', '.join(finished)}"
    return f"{out} contains {content}; for the missing parts, use --only {','.join(unfinished)} and another --out"


def write_files(args: argparse.Namespace, output: OutputFolder, inspections: dict[str, Inspection]) -> None:
    """Writes all results that are measured so far, and the pictures that have changed since the last call."""
    results = {label: inspection.results for label, inspection in inspections.items()}
    if args.pictures:
        for picture in titled_pictures(results):
            output.write_picture(picture)
    if args.summary:
        results = {label: summarise(model_results) for label, model_results in results.items()}
    output.write_json(RESULTS_FILE, results)


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
            "pictures need matplotlib; run pip install matplotlib, or use --no-pictures to write only the numbers"
        ) from error


def checkpoint_labels(paths: Sequence[Path]) -> list[str]:
    """Returns a short name for each checkpoint. All names are different.

    A name is that of the file, such as ``checkpoint_best``. If two files have the same name, the name of the folder is
    added to all: ``seed1-checkpoint_best``. If two of these are the same, too, a number is added to all:
    ``seed1-checkpoint_best-2``.
    """
    num_checkpoints = len(paths)
    file_names = [path.stem for path in paths]
    if len(set(file_names)) == num_checkpoints:
        return file_names
    names_with_folders = [f"{path.absolute().parent.name}-{path.stem}" for path in paths]
    if len(set(names_with_folders)) == num_checkpoints:
        return names_with_folders
    return [f"{name}-{number}" for number, name in enumerate(names_with_folders, start=1)]
