"""All that is to be measured on a GPU, in parts of at most nine minutes.

    python benchmarks/gpu.py                      # every part that has no result yet
    python benchmarks/gpu.py --parts block step   # these
    python benchmarks/gpu.py --list

Each part is a process of its own with a limit of nine minutes, and its result is a file in --out, written when it has
ended well; a part that has one, of the same command, is not run again. So a call that stops, or is stopped, is simply
repeated. A part that fails keeps its output beside the results, and the others go on. Parts with the Triton kernels of
docs/gpu-kernels.md run beside the same parts without.

With --dry everything runs on the CPU in sizes of a few words, which shows that the commands work and measures nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from block import HEADS, WIDTH, build, step
from common import ROOT

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.computations import kernels
from fairseq_synth.masks import causal_mask

MINUTES = 9
SIMPLE = ["random", "relative_random", "fixed_random", "factorized_random", "dense"]
MIXED = [name for name in VARIANTS if name not in [*SIMPLE, "vanilla"]]


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each part; ``OUT`` stands for the file of its result."""
    once = ["--device", args.device, "--dtype", args.dtype, "--out", "OUT", "--rounds", "1"]
    benchmark = once if args.dry else [*once[:-1], "10"]
    of_blocks = once if args.dry else [*once[:-1], "50"]  # a round takes milliseconds, which vary
    short = ["2x6"] if args.dry else ["128x32", "32x128"]
    square, causal = ("1x9", "1x9") if args.dry else ("256x256", "4x1024")
    data = ["--data", args.data, "--max-tokens", "4096", "--batches", "4"] if args.data else ["--shapes", *short]
    tests = ["-m", "pytest", "-q", "--device", args.device, "-p", "no:cacheprovider"]
    workers = [] if args.dry else ["-n", str(min(16, os.cpu_count() or 1))]  # most of the time is the compiler's
    found = {
        "tests": [*tests, "tests/test_computations.py", "tests/test_attention.py"],
        "tests-kernels": [*tests, *workers, "tests/kernels"],
        "correct": ["benchmarks/gpu.py", "--correctness", "OUT", *(["--dry"] if args.dry else [])],
        "backend": ["benchmarks/gpu.py", "--backend", "OUT", *(["--dry"] if args.dry else [])],
    }
    if args.dry:
        found["tests"].append("-k=test_rows_of_padding_are_finite")
        found["tests-kernels"].append("-k=test_off_by_default")
    for name, variants in (("simple", SIMPLE), ("mixed", MIXED)):
        names = ["--variants", *(variants[:1] if args.dry else variants)]
        block = ["benchmarks/block.py", *names, *of_blocks]
        step = ["benchmarks/step.py", *names, *benchmark]
        memory = ["benchmarks/memory.py", *names, *once]
        generate = ["benchmarks/generate.py", *names, *benchmark]
        found[f"block-{name}"] = [*block, "--shapes", *short, square]
        found[f"causal-{name}"] = [*block, "--shapes", causal, "--causal"]
        found[f"step-{name}"] = [*step, *data]
        found[f"step-large-{name}"] = [*step, "--shapes", "2x9" if args.dry else "128x256"]
        found[f"memory-{name}"] = [*memory, "--shapes", "8x64" if args.dry else square]  # less cannot be measured
        found[f"generate-{name}"] = [*generate, *("--tokens 3 --sentences 2 --words 50".split() if args.dry else [])]
        if args.dry:
            for part in ("step", "step-large"):
                found[f"{part}-{name}"] += ["--words", "50"]
    return found


def parts_of(args: argparse.Namespace) -> list[str]:
    """All parts; each of speed and memory twice, without and with the kernels, but for generation, which has none."""
    names = list(commands(args))
    timed = [name for name in names if name.startswith(("block", "causal", "step", "memory"))]
    return names + [f"{name}+kernels" for name in timed]


def run_part(part: str, args: argparse.Namespace) -> bool:
    """Runs a part, unless it has a result; whether it has one then."""
    result, log, fresh, asked = (args.out / f"{part}.{kind}" for kind in ("json", "log", "new", "command"))
    name, _, with_kernels = part.partition("+")
    words = commands(args)[name]
    if result.exists() and asked.exists() and asked.read_text() == " ".join(words):
        print(f"{part}: has a result in {result}")
        return True
    result.unlink(missing_ok=True)  # of another command
    asked.write_text(" ".join(words))
    command = [sys.executable, *(str(fresh) if word == "OUT" else word for word in words)]
    environment = {**os.environ, kernels.VARIABLE: "1" if with_kernels or name == "correct" else "0"}
    if args.dry:
        environment["TRITON_INTERPRET"] = "1"
    fresh.unlink(missing_ok=True)
    print(f"{part}: {' '.join(command)}", flush=True)
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=60 * MINUTES
            )
            problem = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"not done in {MINUTES} minutes"
    if problem:
        print(f"{part}: {problem}; its output is in {log}")
        return False
    if not fresh.exists():  # of tests
        fresh.write_text(json.dumps({"command": command[1:], "summary": log.read_text().splitlines()[-1:]}, indent=2))
    fresh.rename(result)
    return True


def correctness(out: Path, dry: bool) -> None:
    """Every variant in half precision by the kernels: errors against fp64, and whether two runs have equal bits."""
    shapes = [(3, 7, False)] if dry else [(64, 32, False), (32, 128, False), (4, 1024, True)]
    rows: dict[str, dict[str, Any]] = {}
    for name in [name for name in VARIANTS if name != "vanilla"][: 2 if dry else None]:
        for bsz, length, causal in shapes:
            rows[f"{name} {bsz}x{length}"] = compared(name, bsz, length, causal, dry)
    out.write_text(json.dumps(rows, indent=2) + "\n")
    bad = [name for name, row in rows.items() if not (row["kernels"] and row["equal bits"] and row["error"] < 0.05)]
    if bad:
        sys.exit(f"error: without kernels, with unequal bits or with an error of 0.05: {', '.join(bad)}; see {out}")


def compared(name: str, bsz: int, length: int, causal: bool, dry: bool) -> dict[str, Any]:
    """Launches of one block by the kernels, whether two runs have equal bits, and the largest error against fp64."""
    device, dtype = ("cpu", torch.float16) if dry else ("cuda", torch.bfloat16)
    width, heads = (32, 2) if dry else (WIDTH, HEADS)
    with mock.patch.multiple("block", WIDTH=width, HEADS=heads):
        module = build(name, length, causal).to(device, dtype).train()
    torch.manual_seed(0)
    x, grad = torch.randn(2, length, bsz, width, device=device).to(dtype)
    lengths = torch.arange(bsz, device=device) * length // bsz  # one sentence is empty
    mask = None if causal else torch.arange(length, device=device)[None] >= lengths[:, None]
    visible = torch.ones_like(x[..., :1]) if mask is None else (~mask).t().unsqueeze(-1).to(dtype)

    def gradients() -> list[torch.Tensor]:
        like = next(module.parameters())
        leaf = x.detach().clone().to(like.dtype).requires_grad_()
        out, _ = module(leaf, key_padding_mask=mask, attn_mask=causal_mask(leaf) if causal else None)
        out = out * visible.to(like.dtype)
        module.zero_grad()
        out.backward(grad.to(like.dtype))
        return [out.detach(), leaf.grad, *(p.grad for p in module.parameters())]

    with mock.patch.object(kernels, "run", wraps=kernels.run) as run:
        first, second = gradients(), gradients()
    module.double()  # the kernels have no fp64
    exact = gradients()
    errors = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in zip(first, exact)]
    equal = all(map(torch.equal, first, second))
    return {"kernels": run.call_count // 2, "equal bits": equal, "error": float(max(errors))}


def backend(out: Path, dry: bool) -> None:
    """The kernels that stock fairseq's block calls on this device, by time: they name the backend of SDPA."""
    args = argparse.Namespace(device="cpu" if dry else "cuda", dtype="fp32" if dry else "bf16")
    activities = [torch.profiler.ProfilerActivity.CPU if dry else torch.profiler.ProfilerActivity.CUDA]
    rows: dict[str, list[str]] = {}
    for bsz, length in [(3, 7)] if dry else [(128, 32), (32, 128), (256, 256)]:
        run = step(build("stock", length, False), bsz, length, False, args)
        run()
        with torch.profiler.profile(activities=activities) as profile:
            run()
        rows[f"{bsz}x{length}"] = [event.key for event in profile.key_averages()]
    out.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", nargs="+", help="the parts to run, or what they begin with (default: all)")
    p.add_argument("--list", action="store_true", help="print the names of the parts")
    p.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    p.add_argument(
        "--data", type=os.path.abspath, help="a corpus as fairseq-preprocess writes it, for the training step"
    )
    p.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    p.add_argument("--dry", action="store_true", help="on the CPU, in sizes of a few words: measures nothing")
    p.add_argument("--correctness", type=Path, help="internal: one part")
    p.add_argument("--backend", type=Path, help="internal: one part")
    args = p.parse_args()
    args.device = "cpu" if args.dry else "cuda"
    if args.dry:
        args.dtype = "fp32"
    elif not torch.cuda.is_available() and not args.list:
        sys.exit("error: this machine has no GPU that torch can use; --dry shows the parts on a CPU")
    if args.correctness:
        correctness(args.correctness, args.dry)
        return
    if args.backend:
        backend(args.backend, args.dry)
        return
    parts = parts_of(args)
    unknown = [part for part in args.parts or [] if not any(name.startswith(part) for name in parts)]
    if unknown:
        sys.exit(f"error: --parts {' '.join(unknown)}: choose from {', '.join(parts)}")
    parts = [name for name in parts if not args.parts or name.startswith(tuple(args.parts))]
    if args.list:
        print("\n".join(parts))
        return
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = [part for part in parts if not run_part(part, args)]
    if failed:
        sys.exit(f"error: no result of {', '.join(failed)}; a second call runs them again")


if __name__ == "__main__":
    main()
