"""Writes the folder of an inspection, file by file, so that what is finished stays when it is interrupted."""

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
    """A folder of figures and pictures. Every file in it is complete."""

    def __init__(self, folder: Path, unfinished: Path) -> None:
        """Takes the folder, and another one for files that are being written."""
        self.folder = folder
        self.unfinished = unfinished
        self.digests: dict[str, str] = {}  # {name of a picture that is written: its digest}

    def write_json(self, name: str, values: Any) -> None:
        """Writes values to a file, in place of what it held."""
        path = self.unfinished / name
        path.write_text(json.dumps(values, separators=(",", ":")) + "\n", encoding="utf-8")
        os.replace(path, self.folder / name)

    def write_picture(self, picture: Picture) -> None:
        """Draws a picture, unless it is there already as it would be drawn."""
        digest = picture.digest()
        if self.digests.get(picture.name) == digest:
            return
        picture.save(self.unfinished)
        os.replace(self.unfinished / picture.name, self.folder / picture.name)
        self.digests[picture.name] = digest

    def names(self) -> list[str]:
        """Returns the names of the files."""
        return sorted(path.name for path in self.folder.iterdir())


@contextlib.contextmanager
def output_folder(out: Path) -> Iterator[OutputFolder]:
    """Makes a folder for the body to write, and removes it if nothing is in it at the end.

    Raises:
        SynthesizerError: `out` holds something, or cannot be made.
    """
    try:
        folder = out.resolve()  # a link to an empty folder stays
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SynthesizerError(f"--out {out}: exists already; remove it, or choose another folder")
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise SynthesizerError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from error
    try:
        yield OutputFolder(folder, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
