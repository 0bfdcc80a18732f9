"""What the benchmarks share: flags, stopwatches, models, and a report as a table and a JSON file."""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from rounds import Comparison, Function, Stopwatch, compare_in_turns

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairseq_synth import register  # noqa: E402
from fairseq_synth.computations import kernels  # noqa: E402
from pages.markdown import markdown_table  # noqa: E402
from recipes.provenance import here  # noqa: E402

register()
STOCK = "stock"  # the name of fairseq's own Transformer
CONVOLUTIONS = {"lightconv": "lightweight", "dynamicconv": "dynamic"}  # {fairseq's models: its names of their kinds}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---- flags


def make_parser(description: str, variants: list[str], rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all benchmarks have.

    Args:
        description: the text of --help.
        variants: what is compared with stock fairseq by default.
        rounds: how many rounds are timed by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=variants, help="what to compare with stock fairseq")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; with 1, CPU time is compared")
    parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds, after one round of warm-up")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    return parser


def set_up_device(args: argparse.Namespace) -> None:
    """Sets the number of CPU threads. Ends with a one-line error if --device cuda finds no GPU."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: this machine has no GPU that torch can use; take --device cpu")
    torch.set_num_threads(args.threads)


def parse_shape(shape: str) -> tuple[int, int]:
    """Returns the numbers of sentences and tokens of a shape such as ``32x128``."""
    sentences, tokens = shape.split("x")
    return int(sentences), int(tokens)


# ---- time


def compare_with_stock(functions: Mapping[str, Function], device: str, rounds: int) -> dict[str, Comparison]:
    """Times functions in turns, and returns {name: its speed relative to the function that is called ``stock``}."""
    stopwatch = choose_stopwatch(device)
    return compare_in_turns(functions, STOCK, stopwatch, rounds, warm_up=1)


def choose_stopwatch(device: str) -> Stopwatch:
    """Returns a stopwatch for a device.

    On one CPU thread it measures CPU time, which neighbours disturb least; on several threads the time of the clock.
    """
    if device == "cuda":
        return time_on_gpu
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def time_on_cpu(function: Function) -> float:
        """Calls a function and returns the seconds that it took."""
        start = clock()
        function()
        return clock() - start

    return time_on_cpu


def time_on_gpu(function: Function) -> float:
    """Calls a function and returns the seconds between the events before and after it on the GPU."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    milliseconds = start.elapsed_time(end)
    return milliseconds / 1000


# ---- report


def table_cells(column: str, comparison: Comparison) -> dict[str, float]:
    """Returns the cells of a row of a table: the ratio of a column, and the lowest and highest round."""
    return {
        column: comparison.ratio,
        f"{column} from": comparison.lowest,
        f"{column} to": comparison.highest,
    }


def report(title: str, unit: str, rows: Mapping[str, Mapping[str, float]], args: argparse.Namespace) -> None:
    """Prints a table with a row for each name, and writes a record to the file of ``--out``."""
    origin = here(gpus=1 if args.device == "cuda" else 0)
    versions = ", ".join(f"{program} {version}" for program, version in origin["versions"].items())
    print(f"\n{title}; {unit}; {origin['hardware']}; {versions}\n")
    columns = list(next(iter(rows.values())))
    cells = []
    for name, row in rows.items():
        cells.append([name, *(f"{row[column]:.2f}" if column in row else "" for column in columns)])
    print(markdown_table(["", *columns], cells), end="")
    if args.out:
        flags = {name: value for name, value in vars(args).items() if name != "out"}
        record = {
            "benchmark": title,
            "unit": unit,
            "command": describe_command(args.device),
            "flags": flags,
            "figures": rows,
            **origin,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=2, default=str) + "\n")


def describe_command(device: str) -> str:
    """Returns the command line of this process without ``--out``, after the kernels' variable if it has an effect."""
    words = ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    switch = os.environ.get(kernels.VARIABLE)
    if switch and device == "cuda":
        words.insert(0, f"{kernels.VARIABLE}={switch}")
    is_value_of_out = False
    for word in sys.argv[1:]:
        if word != "--out" and not is_value_of_out:
            words.append(word)
        is_value_of_out = word == "--out"
    return " ".join(words)


# ---- models


def make_dictionary(number_of_words: int) -> Dictionary:
    """Returns a vocabulary of so many entries, with fairseq's special ones."""
    dictionary = Dictionary()
    for number in range(number_of_words - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    return dictionary


def build_base_model(name: str, dictionary: Dictionary, max_length: int, **flags: Any) -> Any:
    """Builds the base model of WMT En-De without dropout, with the same random weights in every call.

    Args:
        name: ``stock``, ``lightconv``, ``dynamicconv``, or what ``--encoder-synthesizer`` takes.
        dictionary: the joint vocabulary; all embeddings are shared.
        max_length: ``--synth-max-length``, and the longest source and target.
        flags: other fields of the model's arguments, which take precedence.
    """
    fields = {
        "share_all_embeddings": True,
        "dropout": 0.0,
        "max_source_positions": max_length,
        "max_target_positions": max_length,
        **flags,
    }
    if name == STOCK:
        arch = "transformer_wmt_en_de"
    elif name in CONVOLUTIONS:
        arch = "lightconv_wmt_en_de"
        fields["encoder_conv_type"] = CONVOLUTIONS[name]
        fields["decoder_conv_type"] = CONVOLUTIONS[name]
        fields["weight_softmax"] = True
        fields["encoder_glu"] = True
        fields["decoder_glu"] = True
    else:
        arch = "transformer_synth_vanilla_wmt_en_de"
        fields["encoder_synthesizer"] = name
        fields["decoder_synthesizer"] = name
        fields["synth_max_length"] = max_length
    model_args = argparse.Namespace(arch=arch, **fields)
    ARCH_CONFIG_REGISTRY[arch](model_args)
    torch.manual_seed(0)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return ARCH_MODEL_REGISTRY[arch].build_model(model_args, task)
