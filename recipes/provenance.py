"""Where a figure comes from: commit, versions and hardware, as recorded beside every published number, in JSON."""

import importlib.metadata as metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from .command import ROOT, write


def hardware(device: str = "", threads: Optional[int] = None) -> str:
    """The GPU's name, if there is one and `device` is not cpu; else the processor's and its threads (torch's here)."""
    if device != "cpu" or not threads:
        import torch

        if device != "cpu" and torch.cuda.is_available():
            return torch.cuda.get_device_name()
        threads = threads or torch.get_num_threads()
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{model[1] if model else platform.machine()}, {threads} thread(s)"


def device_of(hardware: str) -> str:
    """The folder of results/TABLE for what `hardware` has said."""
    return "cpu" if hardware.endswith("thread(s)") else "gpu"


def asked_threads() -> Optional[int]:
    """The threads that OMP_NUM_THREADS asks for, at the outermost level of a list such as ``4,2``; None: OpenMP's."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) or None if first.isdecimal() else None


def versions() -> Dict[str, str]:
    """Installed versions of what can move a figure."""
    found = {"python": platform.python_version()}
    of_fairseq, of_text = ("fairseq", "ve-fairseq", "fairseq-fixed"), ("subword-nmt", "sacremoses", "sentencepiece")
    for name in ("torch", *of_fairseq, "sacrebleu", *of_text):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The project's commit, with a mark if files but those of results/ differ from it; empty outside of git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        # not those: a cell that was run again would mark the next
        changed = found and git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
    except FileNotFoundError:
        return ""
    return f"{found}-dirty" if changed else found


def here(device: str = "", threads: Optional[int] = None) -> Dict[str, Any]:
    """Commit, versions and hardware now, as `hardware` has it."""
    return {"commit": commit(), "versions": versions(), "hardware": hardware(device, threads)}


def note(file: Path, device: str, processes: int, precision: str) -> None:
    """Adds the origin of a training that starts to the list in its folder; one that was resumed may have several.

    Args:
        processes: how many it has. Each has one GPU or, on a CPU, the number of threads that is recorded.
        precision: fp32, or the half precision that it computes in.
    """
    now = here(device, asked_threads())  # the threads of the training, which is another process
    if processes > 1:
        now["hardware"] = f"{processes} × {now['hardware']}"
    if precision != "fp32":
        now["precision"] = precision
    starts: List[Dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    if starts[-1:] != [now]:
        write(file, json.dumps([*starts, now], indent=1) + "\n")


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes JSON, with a line for each list of numbers, and says so."""
    text = json.dumps(record, indent=1) + "\n"
    write(path, re.sub(r"\[\s+([-+\d.e,\s]+?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text))
    print("wrote", path)
