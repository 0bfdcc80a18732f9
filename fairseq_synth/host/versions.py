"""Which fairseq and torch the plugin works with."""

import logging
import platform
from importlib import metadata

from ..errors import SynthesizerError, first_line

logger = logging.getLogger(__name__)

NEWEST_TORCH = (2, 15)  # pyproject.toml has the bound for pip
SUPPORTED = (
    "supported: Python 3.10 with fairseq 0.12.2 and torch 2.3, Python 3.11 and 3.12 with ve-fairseq 0.12.3 "
    f"and torch 2.6 to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"
)


def check_torch(version: str) -> None:
    """Raises SynthesizerError for a torch older than the tested ones; warns of a newer one."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 3):
        raise SynthesizerError(f"torch {version} is too old; {SUPPORTED}")
    if (major, minor) > NEWEST_TORCH:
        logger.warning(f"torch {version} is newer than the tested ones; {SUPPORTED}")


def check_installed() -> None:
    """The same by what is installed, without an import, which takes seconds; SynthesizerError without torch."""
    try:
        check_torch(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        raise SynthesizerError(f"torch is not installed here; {SUPPORTED}") from None


def import_host() -> None:
    """Raises SynthesizerError if this fairseq has no Transformer that fits, or does not import on this Python."""
    try:
        from fairseq.models.transformer import TransformerEncoderBase  # noqa: F401
    except Exception as error:  # 0.12.2 on Python 3.11 fails with a ValueError from dataclasses
        reason = first_line(error)
        raise SynthesizerError(
            f"this fairseq cannot be used with Python {platform.python_version()} ({reason}); {SUPPORTED}"
        ) from error
