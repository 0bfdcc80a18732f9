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
    """A folder of results and pictures. Every file in it is complete, because it is written in another folder first."""

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
        path = self.unfinished / name
        path.write_text(json.dumps(values, separators=(",", ":")) + "\n", encoding="utf-8")
        os.replace(path, self.folder / name)

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
        """Removes unfinished files; and also the folder, if it is new and nothing has been written to it."""
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
    """Makes the folder `out`, unless it exists and is empty, and returns a writer for it.

    The writer also gets a new hidden folder beside it for unfinished files, such as ``.out-x3k2``.

    Raises:
        SynthesizerError: a file or a folder with files has this name already.
        OSError: no folder can be made there.
    """
    folder = out.resolve()  # If `out` is a link, the files are written where it points, and the link stays.
    is_new = not folder.exists()
    if not is_new and not is_empty_folder(folder):
        raise SynthesizerError(f"--out {out}: exists already; remove it, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
    return OutputFolder(folder, Path(unfinished), is_new)


def is_empty_folder(path: Path) -> bool:
    """Returns whether a path is a folder without files."""
    return path.is_dir() and not any(path.iterdir())
