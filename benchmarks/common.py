"""What the benchmarks share: flags, stopwatches, models, and a report as a table and a JSON file."""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from rounds import Comparison, Function, Stopwatch, compare_in_turns

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairseq_synth import register  # noqa: E402
from fairseq_synth.computations import kernels  # noqa: E402
from pages.markdown import markdown_table  # noqa: E402
from recipes.provenance import describe_environment  # noqa: E402

register()
STOCK = "stock"  # the name of fairseq's own Transformer in all benchmarks
CONVOLUTIONS = {"lightconv": "lightweight", "dynamicconv": "dynamic"}  # {model: its kind, in the words of fairseq}
FIRST_WORD = 4  # index of the first word of a vocabulary, after fairseq's four special symbols
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---- flags


def make_parser(description: str, variants: list[str], rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all benchmarks have.

    Args:
        description: the text of --help.
        variants: the default of --variants, which are compared with stock fairseq.
        rounds: the default of --rounds, which are timed.
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
    """Sets the number of CPU threads, and ends with a one-line error if --device cuda finds no GPU."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: this machine has no GPU that torch can use; use --device cpu")
    torch.set_num_threads(args.threads)


class Shape(NamedTuple):
    """The size of a batch: how many sentences it has, and how many tokens each sentence has."""

    sentences: int
    tokens: int


def parse_shape(text: str) -> Shape:
    """Returns the size of a batch that is written as ``32x128``, which means 32 sentences of 128 tokens."""
    sentences, tokens = text.split("x")
    return Shape(int(sentences), int(tokens))


# ---- time


def compare_with_stock(
    functions: Mapping[str, Function], device: str, rounds: int, warm_up: int = 1
) -> dict[str, Comparison]:
    """Times several functions in turns, and compares each with the one that is called ``stock``.

    Args:
        functions: {name: function}; each is called once in a round.
        device: ``cpu`` or ``cuda``, where the functions do their work.
        rounds: how many rounds are timed.
        warm_up: how many rounds are run before them and not timed.

    Returns:
        {name: the function's speed relative to stock's}.
    """
    stopwatch = choose_stopwatch(device)
    return compare_in_turns(functions, baseline=STOCK, stopwatch=stopwatch, rounds=rounds, warm_up=warm_up)


def choose_stopwatch(device: str) -> Stopwatch:
    """Returns a function that times another function on a device, ``cpu`` or ``cuda``.

    On a single CPU thread it measures CPU time, which other processes disturb least. On several threads it measures
    the time of the clock, because CPU time would add up the threads.
    """
    if device == "cuda":
        return time_on_gpu
    read_clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def time_on_cpu(function: Function) -> float:
        """Calls a function and returns the seconds that it took."""
        start = read_clock()
        function()
        return read_clock() - start

    return time_on_cpu


def time_on_gpu(function: Function) -> float:
    """Calls a function and returns the seconds that the GPU took for its work."""
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
    """Returns the cells that a comparison fills in a row of the printed table, as {heading of a column: value}.

    They are the median of the ratios, and the lowest and highest ratio of a round.
    """
    return {
        column: comparison.ratio,
        f"{column} from": comparison.lowest,
        f"{column} to": comparison.highest,
    }


def report(title: str, unit: str, rows: Mapping[str, Mapping[str, float]], args: argparse.Namespace) -> None:
    """Prints the results of a benchmark as a table, and writes them to the JSON file of ``--out`` if there is one.

    Args:
        title: what was measured.
        unit: what the numbers are, such as ``stock's time / this one's``.
        rows: {name of a variant: {heading of a column: value}}.
        args: the command line's flags.
    """
    number_of_gpus = 1 if args.device == "cuda" else 0
    origin = describe_environment(gpus=number_of_gpus)
    versions = ", ".join(f"{program} {version}" for program, version in origin["versions"].items())
    print(f"\n{title}; {unit}; {origin['hardware']}; {versions}\n")
    print(format_table(rows), end="")
    if args.out:
        # The record does not say in which file it is: --out is left out here, and in the command.
        flags = {name: value for name, value in vars(args).items() if name != "out"}
        record = {
            "benchmark": title,
            "unit": unit,
            "command": describe_command(args.device),
            "flags": flags,
            "figures": rows,
            "commit": origin["commit"],
            "versions": origin["versions"],
            "hardware": origin["hardware"],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=2, default=str) + "\n")


def format_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a table in Markdown, with the columns of the first row; a value that a row does not have is left empty.

    Args:
        rows: {name of a row: {heading of a column: value}}.
    """
    first_row = next(iter(rows.values()))
    headings = list(first_row)
    lines = []
    for name, row in rows.items():
        cells = [name]
        for heading in headings:
            cells.append(f"{row[heading]:.2f}" if heading in row else "")
        lines.append(cells)
    return markdown_table(["", *headings], lines)


def describe_command(device: str) -> str:
    """Returns the command line of this process without ``--out FILE``, so that it can be repeated.

    On a GPU, the environment variable that switches the Triton kernels is in front of it, if it is set.
    """
    script, *arguments = sys.argv
    while "--out" in arguments:
        position = arguments.index("--out")
        del arguments[position : position + 2]  # the flag and its value
    command = " ".join(["python", f"benchmarks/{Path(script).name}", *arguments])
    switch = os.environ.get(kernels.VARIABLE)
    if switch and device == "cuda":
        return f"{kernels.VARIABLE}={switch} {command}"
    return command


# ---- models


def make_dictionary(num_entries: int) -> Dictionary:
    """Returns a vocabulary with so many entries: fairseq's special symbols, and made-up words."""
    dictionary = Dictionary()
    num_words = num_entries - len(dictionary)
    for number in range(num_words):
        dictionary.add_symbol(f"w{number}")
    return dictionary


def build_base_model(name: str, dictionary: Dictionary, max_length: int, **sizes: int) -> Any:
    """Builds the base model of WMT English–German without dropout, with the same random weights in every call.

    Args:
        name: ``stock``, ``lightconv``, ``dynamicconv``, or a value of ``--encoder-synthesizer``.
        dictionary: the vocabulary of both languages; all embeddings are shared.
        max_length: the most tokens of a source and of a target.
        sizes: other sizes than those of the base model, such as ``encoder_embed_dim``.
    """
    arch = choose_architecture(name)
    model_args = argparse.Namespace(
        arch=arch,
        share_all_embeddings=True,
        dropout=0.0,
        max_source_positions=max_length,
        max_target_positions=max_length,
        **sizes,
        **list_flags_of_model(name, max_length),
    )
    add_flags_of_architecture = ARCH_CONFIG_REGISTRY[arch]
    add_flags_of_architecture(model_args)  # sets all flags that are not in `model_args` yet
    torch.manual_seed(0)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return ARCH_MODEL_REGISTRY[arch].build_model(model_args, task)


def choose_architecture(name: str) -> str:
    """Returns fairseq's name for the base architecture of a model: stock's, a convolution's or a Synthesizer's."""
    if name == STOCK:
        return "transformer_wmt_en_de"
    if name in CONVOLUTIONS:
        return "lightconv_wmt_en_de"
    return "transformer_synth_vanilla_wmt_en_de"


def list_flags_of_model(name: str, max_length: int) -> dict[str, Any]:
    """Returns the flags that a model needs in addition to its architecture: {name in fairseq's arguments: value}.

    For example, all Synthesizers have one architecture here, and the flag ``encoder_synthesizer`` names the variant.

    Args:
        name: ``stock``, ``lightconv``, ``dynamicconv``, or a value of ``--encoder-synthesizer``.
        max_length: the most tokens that a Synthesizer has parameters for.
    """
    if name == STOCK:
        return {}
    if name in CONVOLUTIONS:
        return {
            "encoder_conv_type": CONVOLUTIONS[name],
            "decoder_conv_type": CONVOLUTIONS[name],
            "weight_softmax": True,
            "encoder_glu": True,
            "decoder_glu": True,
        }
    return {
        "encoder_synthesizer": name,
        "decoder_synthesizer": name,
        "synth_max_length": max_length,
    }
