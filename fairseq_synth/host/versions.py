"""Checks that the plugin works with the installed fairseq and torch."""

import logging
import platform
from importlib import metadata
from typing import NamedTuple

from ..errors import SynthesizerError, first_line

logger = logging.getLogger(__name__)


class Version(NamedTuple):
    """A version of torch without its patch level; the earlier one is the smaller one."""

    major: int
    minor: int


OLDEST_TORCH = Version(2, 3)
NEWEST_TORCH = Version(2, 15)  # pyproject.toml has the same bound for pip
SUPPORTED = (
    "supported: Python 3.10 with fairseq 0.12.2 and torch 2.3, Python 3.11 and 3.12 with ve-fairseq 0.12.3 "
    f"and torch 2.6 to {NEWEST_TORCH.major}.{NEWEST_TORCH.minor}"
)


def check_torch(version: str) -> None:
    """Checks a version of torch, such as "2.6.0+cpu": logs a warning if it is newer than the tested versions.

    Raises SynthesizerError if it is older.
    """
    major, minor = version.split(".")[:2]
    torch_version = Version(int(major), int(minor))
    if torch_version < OLDEST_TORCH:
        raise SynthesizerError(f"torch {version} is too old; {SUPPORTED}")
    if torch_version > NEWEST_TORCH:
        logger.warning(f"torch {version} is newer than the tested versions; {SUPPORTED}")


def check_installed() -> None:
    """Checks the version of the installed torch without importing it, which takes seconds.

    Raises SynthesizerError if it is too old, or not installed.
    """
    try:
        check_torch(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        raise SynthesizerError(f"torch is not installed here; {SUPPORTED}") from None


def import_host() -> None:
    """Imports fairseq's Transformer, to see whether this fairseq can be used with this version of Python.

    Raises SynthesizerError if it cannot be imported or is too old.
    """
    try:
        from fairseq.models.transformer import TransformerEncoderBase  # noqa: F401
    except Exception as error:  # 0.12.2 on Python 3.11 fails with a ValueError from dataclasses
        reason = first_line(error)
        raise SynthesizerError(
            f"this version of fairseq does not work with Python {platform.python_version()} ({reason}); {SUPPORTED}"
        ) from error
