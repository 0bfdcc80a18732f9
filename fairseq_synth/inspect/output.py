"""Writes the folder of an inspection file by file, so that finished files stay if the command is interrupted."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import SynthesizerError
from .drawing import Picture


class OutputFolder:
    """Writes results and pictures to a folder, in which every file is complete at any time.

    To this end, each file is written in another folder first, and then moved.
    """

    def __init__(self, folder: Path, unfinished: Path, is_new: bool) -> None:
        """Makes a writer for an existing folder.

        Args:
            folder: the folder.
            unfinished: another folder, on the same disk, for files that are being written.
            is_new: whether the folder was made for this writer.
        """
        self.folder = folder
        self.unfinished = unfinished
        self.is_new = is_new
        self.digests: dict[str, str] = {}  # {name of a picture that is written: its digest}

    def write_json(self, name: str, values: Any) -> None:
        """Writes values to a JSON file, in place of the file of that name if there is one."""
        text = json.dumps(values, separators=(",", ":"))
        unfinished_file = self.unfinished / name
        unfinished_file.write_text(f"{text}\n", encoding="utf-8")
        os.replace(unfinished_file, self.folder / name)

    def write_picture(self, picture: Picture) -> None:
        """Draws a picture and writes its file, unless this object has already written the same picture."""
        digest = picture.digest()
        if self.digests.get(picture.name) == digest:
            return
        picture.save(self.unfinished)
        os.replace(self.unfinished / picture.name, self.folder / picture.name)
        self.digests[picture.name] = digest

    def names(self) -> list[str]:
        """Returns the names of all files in the folder."""
        return sorted(path.name for path in self.folder.iterdir())

    def clean_up(self) -> None:
        """Removes the folder of unfinished files. Also removes the folder of results, if it is new and still empty."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        if self.is_new and not any(self.folder.iterdir()):
            self.folder.rmdir()


@contextlib.contextmanager
def output_folder(out: Path) -> Iterator[OutputFolder]:
    """Makes the folder `out`, and yields a writer for it, so that the body can write results and pictures.

    A second, hidden folder beside it holds files that are being written, and is removed at the end. If the body has
    written nothing, the folder `out` is removed, too, unless it existed before.

    Args:
        out: a new or empty folder, or a link to an empty folder.

    Raises:
        SynthesizerError: a file or a folder with files has this name already, or no folder can be made there.
    """
    try:
        output = make_output_folder(out)
    except OSError as error:
        raise SynthesizerError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from error
    try:
        yield output
    finally:
        output.clean_up()


def make_output_folder(out: Path) -> OutputFolder:
    """Makes a folder for results, and a hidden folder beside it for files that are being written.

    For example, ``results`` gets the hidden folder ``.results-x3k2``, with random letters at the end. An empty folder
    that exists already is used as it is.

    Args:
        out: the folder for results.

    Returns:
        a writer that has both folders.

    Raises:
        SynthesizerError: a file or a folder with files has this name already.
        OSError: no folder can be made there.
    """
    folder = out.resolve()  # If `out` is a link to a folder, the results are written to this folder.
    exists = folder.exists()
    if exists and not is_empty_folder(folder):
        raise SynthesizerError(f"--out {out}: exists already; remove it, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    hidden_folder = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
    return OutputFolder(folder, unfinished=Path(hidden_folder), is_new=not exists)


def is_empty_folder(path: Path) -> bool:
    """Returns whether a path is a folder without files."""
    return path.is_dir() and not any(path.iterdir())
