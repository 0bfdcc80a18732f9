"""Where a figure comes from: commit, versions and hardware, as recorded beside every published number."""

import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Dict

import torch


def hardware() -> str:
    """The GPU's name, or the processor's and the threads that were used."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{model[1] if model else platform.machine()}, {torch.get_num_threads()} thread(s)"


def versions() -> Dict[str, str]:
    """Installed versions of what can move a figure."""
    found = {"python": platform.python_version()}
    for name in ("torch", "fairseq", "ve-fairseq", "fairseq-fixed", "sacrebleu", "subword-nmt", "sacremoses"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The project's commit, with a mark if files differ from it; empty outside of git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""
