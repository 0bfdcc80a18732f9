"""What the benchmarks share: pairs timed in turns in one process, and a table and a JSON file of the ratios."""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairseq_synth import register  # noqa: E402
from fairseq_synth.computations import kernels  # noqa: E402
from pages.tables import markdown  # noqa: E402
from recipes.provenance import here  # noqa: E402

register()
STOCK = "stock"
CONVOLUTIONS = {"lightconv": "lightweight", "dynamicconv": "dynamic"}  # fairseq's, and its names of their kinds
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parser(doc: str, variants: list[str], rounds: int) -> argparse.ArgumentParser:
    """The flags that all benchmarks have."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--variants", nargs="+", default=variants, help="what to compare with stock fairseq")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--dtype", default="fp32", choices=DTYPES)
    p.add_argument("--threads", type=int, default=1, help="CPU threads; with 1, CPU time is what is compared")
    p.add_argument("--rounds", type=int, default=rounds, help="timed rounds after one of warm-up")
    p.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    return p


def setup(args: argparse.Namespace) -> None:
    """Applies the flags; ends with a clear line where there is no such device."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: this machine has no GPU that torch can use; take --device cpu")
    torch.set_num_threads(args.threads)


def stopwatch(device: str) -> Callable[[Callable[[], Any]], float]:
    """Seconds of one call: of the GPU, of one CPU thread (which neighbours disturb least), or of the clock."""

    def gpu(function: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    def cpu(function: Callable[[], Any]) -> float:
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        function()
        return clock() - start

    return gpu if device == "cuda" else cpu


def ratios(functions: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Times stock and the others in turns.

    Returns:
        of each name: the median, lowest and highest of stock's time over its own, round by round, and the
        median of its seconds.
    """
    clock = stopwatch(device)
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds + 1):
        turn = names[r % len(names) :] + names[: r % len(names)]
        for name in turn:
            taken = clock(functions[name])
            if r > 0:
                seconds[name].append(taken)
    out = {}
    for name in names:
        pairs = [a / b for a, b in zip(seconds[STOCK], seconds[name])]
        out[name] = {
            "ratio": statistics.median(pairs),
            "lowest": min(pairs),
            "highest": max(pairs),
            "seconds": statistics.median(seconds[name]),
        }
    return out


def cells(column: str, figures: dict[str, float]) -> dict[str, float]:
    """The ratio of a name in `ratios`, with its spread, as cells of a table."""
    return {column: figures["ratio"], f"{column} from": figures["lowest"], f"{column} to": figures["highest"]}


def report(title: str, unit: str, rows: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    """Prints a Markdown table, name by column, and writes ``--out``."""
    columns, origin = list(next(iter(rows.values()))), here(args.device == "cuda")
    print(f"\n{title}; {unit}; {origin['hardware']}; {', '.join(f'{k} {v}' for k, v in origin['versions'].items())}\n")
    cells = [[name, *(f"{row[c]:.2f}" if c in row else "" for c in columns)] for name, row in rows.items()]
    print(markdown(["", *columns], cells), end="")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        value = os.environ.get(kernels.VARIABLE)
        environment = [f"{kernels.VARIABLE}={value}"] if value and args.device == "cuda" else []
        program = ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
        flags = {k: v for k, v in vars(args).items() if k != "out"}
        record = {
            "benchmark": title,
            "unit": unit,
            "command": " ".join([*environment, *program, *_without_out(sys.argv[1:])]),
            "flags": flags,
            "figures": rows,
            **origin,
        }
        args.out.write_text(json.dumps(record, indent=2, default=str) + "\n")


def _without_out(argv: list[str]) -> list[str]:
    kept = list(argv)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return kept


def words_dictionary(words: int) -> Dictionary:
    """A vocabulary of `words` entries."""
    dictionary = Dictionary()
    for i in range(words - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    return dictionary


def base_model(name: str, dictionary: Dictionary, max_length: int, **flags: Any) -> Any:
    """The base model of WMT En-De, without dropout: stock, one of fairseq's convolutional ones, or a variant.

    Args:
        name: ``stock``, ``lightconv``, ``dynamicconv`` or what ``--encoder-synthesizer`` takes.
        dictionary: the joint vocabulary; all embeddings are shared.
        max_length: ``--synth-max-length``.
        flags: other fields of the model's arguments.
    """
    if name == STOCK:
        arch = "transformer_wmt_en_de"
    elif name in CONVOLUTIONS:
        arch = "lightconv_wmt_en_de"
        flags["encoder_conv_type"] = flags["decoder_conv_type"] = CONVOLUTIONS[name]
        flags["weight_softmax"] = flags["encoder_glu"] = flags["decoder_glu"] = True
    else:
        arch = "transformer_synth_vanilla_wmt_en_de"
        flags.update(encoder_synthesizer=name, decoder_synthesizer=name, synth_max_length=max_length)
    sizes = dict(dropout=0.0, max_source_positions=max_length, max_target_positions=max_length)
    model_args = argparse.Namespace(arch=arch, share_all_embeddings=True, **{**sizes, **flags})
    ARCH_CONFIG_REGISTRY[arch](model_args)
    torch.manual_seed(0)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return ARCH_MODEL_REGISTRY[arch].build_model(model_args, task)
