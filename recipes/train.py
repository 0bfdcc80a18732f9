"""Trains an architecture on prepared data: on this machine's GPUs, on those of several machines, or on its CPU.

  scripts/train.sh ARCH DATASET [options] [-- flags for fairseq-train]

  ARCH      transformer_synth_random_vanilla_wmt_en_de and the like, or fairseq's own: transformer_wmt_en_de,
            transformer_wmt_en_de_big, transformer_multi30k. Its ending chooses the recipe. Language models:
            transformer_lm_synth_random_ptb, transformer_lm_ptb; classifiers: roberta_synth_dense_agnews, roberta_imdb.
  DATASET   en-de or en-fr; ptb, wikitext2, wikitext103, lm1b; agnews, imdb. With --data any name;
            for translation a pair of languages all the same

The batch stays the same for any number of GPUs: --update-freq and, where it does not divide, --max-tokens follow.
Stop it at any time; the same command goes on from the last checkpoint. DRY_RUN=1 shows the command only.

Where the text has longer sentences than the architecture takes, --synth-max-length follows the text and is said.
"""

import argparse
import functools
import math
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from fairseq_synth.names import VARIANTS

from . import provenance
from .command import ROOT, Parser, UserError, dry_run, integer, locked, pin_settings, read_settings, show, split_flags
from .corpora import CORPORA
from .hyperparameters import RECIPES, Recipe, number_of

LENGTH_UNIT = 8  # a length that follows the text is a multiple of it, as the products of GPUs like it


def make_parser() -> Parser:
    """The options of train.sh."""
    parser = Parser("train", __doc__)
    add = parser.add_argument
    number = functools.partial(add, type=integer(1), metavar="N")
    add("arch", metavar="ARCH")
    add("dataset", metavar="DATASET")
    add("--recipe", choices=RECIPES, help="default: the one of the architecture's ending")
    where = "prepared data (default: data/DATASET; data/wmt14-PAIR, data/multi30k-PAIR)"
    add("--data", type=Path, metavar="DIR", help=where)
    add("--save-dir", type=Path, metavar="DIR", help="checkpoints and the log (default: runs/ARCH-DATASET-seedN)")
    where = "of this machine (default: the recipe's: all or none); 0 trains on the CPU"
    number("--gpus", type=integer(0), help=where)
    number("--processes", default=1, help="with --gpus 0, how many (default: 1)")
    number("--threads", help="CPU threads of each process (default: the recipe's, or OpenMP's)")
    number("--nodes", default=1, help="machines; call the script on each, with --rendezvous")
    add("--rendezvous", metavar="HOST:PORT", help="with --nodes: the first machine and a free port on it")
    number("--timeout", default=600, help="seconds without progress that end the run")
    tokens = "tokens of one update, all processes together (default: the recipe's). A sentence counts "
    number("--batch-tokens", help=tokens + "as the longer of its sides, and as the longest of its batch")
    number("--max-tokens", help="most tokens of a pass in one process (default: the recipe's)")
    number("--max-update", help="updates (default: the recipe's)")
    saved = "updates between checkpoints (default: the recipe's); the last 10 are kept, or 1 if none are averaged"
    number("--save-every", help=saved)
    add("--precision", help="fp32, fp16 or bf16 (default: bf16 where the GPU computes in it, else fp16; CPU fp32)")
    number("--seed", type=integer(0), default=1, help="(default: 1)")
    add("--init", type=Path, metavar="RUN_DIR", help="begin with the weights of that run (data: prepare.sh --like)")
    return parser


def models() -> List[str]:
    """Every model by the name that the tables have for it, fairseq's own first."""
    return ["transformer", *(variant.replace("+", "_") for variant in VARIANTS if variant != "vanilla")]


def recipe_name(arch: str, dataset: str = "") -> str:
    """The recipe of an architecture's ending; of several that of the data set, else the first."""
    # the longest preset first: one ends in another
    names = sorted(RECIPES, key=lambda name: len(RECIPES[name].preset), reverse=True)
    fitting = [name for name in names if arch.endswith(f"_{RECIPES[name].preset}")]
    fitting.sort(key=lambda name: RECIPES[name].corpus != dataset)
    if not fitting:
        endings = dict.fromkeys(RECIPES[name].preset for name in names)
        raise UserError(f"{arch}: no recipe; an architecture that ends in {' or '.join(endings)} has one")
    recipe = RECIPES[fitting[0]]
    if "_synth_" in arch:
        known = [*models()[1:], "vanilla"]
        if arch not in map(recipe.architecture, known):
            example = recipe.architecture("NAME")
            raise UserError(f"{arch}: no such architecture; {example} are there for {', '.join(known)}")
    return fitting[0]


def gpus_here() -> Tuple[int, str]:
    """The GPUs of this machine, and the half precision that they compute in."""
    import torch

    n = torch.cuda.device_count()
    return n, "bf16" if n and torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def longest_sentence(data: Path) -> int:
    """Tokens of the longest sentence of binarised data, its end included; 0 where there are none yet.

    The lengths stand at the head of fairseq's .idx files: 18 bytes of names, their number, and a 32-bit integer each.
    """
    longest = 0
    for path in (data / "bin").glob("*.idx"):
        sizes = array("i")
        with open(path, "rb") as file:
            (number,) = struct.unpack("<18xQ", file.read(26))
            sizes.fromfile(file, number)
        longest = max(longest, *sizes)
    return longest


def best_checkpoint(run_dir: Path) -> Path:
    """The average that an evaluation has made, else the best checkpoint."""
    average, best = run_dir / "checkpoint_avg.pt", run_dir / "checkpoint_best.pt"
    path = average if average.exists() else best
    if not path.exists() and not dry_run():
        raise UserError(f"{path}: no such file; train to the first validation")
    return path


def init_flags(init: Path, arch: str, data: Path) -> List[str]:
    """The flags that begin a training with the weights of another run, and with its length."""
    found = read_settings(init / "settings")
    if found.get("arch", arch) != arch:
        raise UserError(f"--init {init}: is a run of {found['arch']}, not of {arch}")
    for words in (data / "bin").glob("dict.*.txt"):
        other = Path(found.get("data", data)) / "bin" / words.name
        if not other.exists() or other.read_bytes() != words.read_bytes():
            raise UserError(f"--init {init}: {data} has other words; prepare them by prepare.sh --like {found['data']}")
    lengths = re.findall(r"--synth-(?:max-length|beyond-length)[= ]\S+", found.get("flags", ""))
    flags = [word for flag in lengths for word in re.split("[= ]", flag)]
    return ["--finetune-from-model", str(best_checkpoint(init).resolve()), *flags]


def length_flags(arch: str, recipe: Recipe, data: Path, rest: Sequence[str], init: Optional[Path]) -> List[str]:
    """The flag ``--synth-max-length`` for text with longer sentences than the preset takes, and says so.

    Args:
        rest: flags for fairseq-train: what they say of the length stands.
        init: the run whose length this is, if any.
    """
    longest = longest_sentence(data) if recipe.task == "translation" and "_synth_" in arch else 0
    own = ("--synth-max-length", "--synth-beyond-length")
    most = number_of("--synth-max-length", rest) or recipe.max_length
    if init and longest > most and "tile" not in " ".join(rest):
        raise UserError(
            f"--init {init}: its sentences have up to {most} tokens, and {data} "
            f"has one of {longest}; train that run with -- --synth-max-length {longest}, prepare {data} without such "
            "sentences, or give -- --synth-beyond-length tile"
        )
    if longest <= recipe.max_length or any(word.split("=")[0] in own for word in rest):
        return []
    length = math.ceil(longest / LENGTH_UNIT) * LENGTH_UNIT
    print(
        f"--synth-max-length {length}: the longest sentence of {data} has {longest} tokens, and {arch} takes "
        f"{recipe.max_length} by default. After -- you may give another one, or --synth-beyond-length tile"
    )
    return ["--synth-max-length", str(length)]


def split_batch(batch_tokens: int, world: int, max_tokens: int, longest: int) -> Tuple[int, int]:
    """(tokens of a process at once, passes of an update): as few passes as fit, each as large as the batch needs."""
    passes = math.ceil(batch_tokens / (world * max_tokens))
    tokens = batch_tokens // (world * passes)
    if tokens < longest:
        raise UserError(
            f"--batch-tokens {batch_tokens}: leaves {tokens} for each of {world} processes at a time, less than a "
            f"sentence of {longest}; raise it"
        )
    return tokens, passes


def device_flags(args: argparse.Namespace) -> Tuple[int, List[str]]:
    """(processes of this machine, flags for its GPUs or CPU); fills in the number of GPUs."""
    flags: List[str] = []
    precision, best = args.precision, "fp32"
    if args.gpus != 0:
        found, best = gpus_here()
        if args.gpus is None and not found:
            raise UserError(
                "--gpus: none found here; --gpus 0 trains on the CPU, and with DRY_RUN=1 --gpus 8 shows the command "
                "for 8"
            )
        if args.gpus is None:
            args.gpus = found
        if not dry_run() and args.gpus > found:
            raise UserError(f"--gpus {args.gpus}: this machine has {found}")
        if args.processes != 1:
            raise UserError(f"--processes {args.processes}: is for --gpus 0; every GPU has one process")
    else:
        flags.append("--cpu")
        if precision == "fp16":
            raise UserError("--precision fp16: needs a GPU; on a CPU choose fp32 or bf16")
    precision = precision or best
    if precision not in ("fp32", "fp16", "bf16"):
        raise UserError(f"--precision {precision}: choose fp32, fp16 or bf16")
    return args.gpus or args.processes, flags + ([] if precision == "fp32" else [f"--{precision}"])


def training_command(
    args: argparse.Namespace, recipe: Recipe, data: Path, save: Path, rest: Sequence[str]
) -> List[str]:
    """The fairseq-train command, under torchrun where there are several processes."""
    own = {**recipe.flags, **count_classes(recipe, data)}
    flags = [word for name, value in own.items() for word in (f"--{name}", value) if word is not None]
    save_every = args.save_every or recipe.save_every
    if save_every:
        keep = "10" if recipe.average else "1"  # beside the best
        flags += ["--save-interval-updates", str(save_every), "--keep-interval-updates", keep, "--no-epoch-checkpoints"]
    else:
        flags += ["--keep-last-epochs", "10", "--patience", "10"]
    processes, device = device_flags(args)
    world = args.nodes * processes
    batch, most = args.batch_tokens or recipe.batch_tokens, args.max_tokens or recipe.max_tokens
    lengths = map(int, re.findall(r"--synth-max-length[= ](\d+)", " ".join(rest)))
    tokens, passes = split_batch(batch, world, most, max([recipe.max_length, *lengths]))
    flags += [*device, "--max-tokens", str(tokens), "--update-freq", str(passes)]
    # without it fairseq counts this machine's GPUs: too many for --gpus 1, and with one in each of several machines
    # each would train by itself
    flags += ["--distributed-world-size", str(world)]
    launch = ["fairseq-train"]
    if world > 1:
        launch = ["torchrun", "--standalone"]
        if args.nodes > 1:
            if ":" not in (args.rendezvous or ""):
                raise UserError(
                    f"--nodes {args.nodes}: needs --rendezvous HOST:PORT, the first machine and a free port of it"
                )
            job = f"{args.arch}-{args.dataset}-{args.seed}"
            launch = ["torchrun", "--nnodes", str(args.nodes), "--rdzv-backend", "c10d"]
            launch += ["--rdzv-endpoint", args.rendezvous, "--rdzv-id", job]
        launch += ["--nproc-per-node", str(processes), "--max-restarts", "0", "--no-python"]
        launch += ["fairseq-train"] if args.gpus else [str(ROOT / "scripts" / "cpu_worker.sh")]
        flags += ["--heartbeat-timeout", str(args.timeout)]
    command = [*launch, str(data / "bin"), "--user-dir", str(ROOT / "fairseq_synth"), "--arch", args.arch]
    if recipe.task == "translation":
        source, target = sides(recipe, args.dataset).split("-")
        command += ["--source-lang", source, "--target-lang", target]
    else:
        command += ["--task", recipe.task]
    command += ["--save-dir", str(save), "--seed", str(args.seed)]
    command += ["--max-update", str(args.max_update or recipe.max_update), *flags]
    return [*command, "--no-progress-bar", "--log-interval", "100", *rest]


def sides(recipe: Recipe, dataset: str) -> str:
    """The pair of languages, or of texts, of a data set."""
    return dataset if "-" in dataset else recipe.pair or dataset


def count_classes(recipe: Recipe, data: Path) -> Dict[str, str]:
    """The flag ``num-classes`` for the labels of prepared data; the recipe's stands where there are none yet."""
    labels = data / "bin" / "label" / "dict.txt"
    if recipe.task != "sentence_prediction" or not labels.exists():
        return {}
    lines = labels.read_text(encoding="utf-8").splitlines()
    return {"num-classes": str(sum(not line.startswith("madeupword") for line in lines))}  # fairseq fills up to 8


def set_threads(threads: Optional[int]) -> None:
    """Gives this process and those it starts a number of CPU threads; None leaves it as it is."""
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def start(argv: Sequence[object], show_line: Optional[Callable[[str], None]] = None) -> None:
    """train.sh in a process of its own, as the training takes its place.

    Args:
        show_line: what to do with each line of the log; default: print it.
    """
    words = list(map(str, argv))
    if dry_run():
        main(words)
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes", "train", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE if show_line else None,
        stderr=subprocess.STDOUT if show_line else None,
        universal_newlines=True,
    )
    with process:
        if process.stdout and show_line:
            for line in process.stdout:
                show_line(line)
    if process.returncode:
        log = Path(words[words.index("--save-dir") + 1]) / "train.log"
        raise UserError(f"the training failed; see {log}. The same call goes on from its last checkpoint")


def default_data(recipe: Recipe, dataset: str) -> Path:
    """The folder of a data set's prepared data where none is named."""
    if recipe.task == "translation" and not recipe.pair:
        known, name = ["en-de", "en-fr"], f"{recipe.corpus}-{dataset}"
    else:
        kinds = {"language_modeling": ("text",), "sentence_prediction": ("labels",)}.get(
            recipe.task, ("pairs", "spans")
        )
        known, name = [corpus for corpus, about in CORPORA.items() if about.kind in kinds], dataset
    if dataset not in known:
        raise UserError(
            f"{dataset}: {', '.join(known)} have data of their own; for others name what prepare.sh made by --data"
        )
    return ROOT / "data" / name


def check_data(data: Path, recipe: Recipe, dataset: str, named: bool) -> None:
    """Refuses data that are not prepared, or for another task. `named`: they are of --data."""
    if not (data / "bin" / "done").exists():
        own = {"language_modeling": "lm {} --from RAW_DIR", "sentence_prediction": "classification {} --from RAW_DIR"}
        how = own.get(recipe.task, f"RAW_DIR {dataset.replace('-', ' ')} {{}}").format(data)
        if dataset in CORPORA:
            how = f"{dataset} {data}"
        elif recipe.task == "translation" and not named:
            how = f"{recipe.corpus} {dataset.split('-')[-1]} {data}"
        raise UserError(f"--data {data}: not prepared, or not to its end; run scripts/prepare.sh {how}")
    settings = read_settings(data / "settings")
    # what is written from text is one task of fairseq's
    task = "translation" if pair_of(settings) else settings.get("task", "translation")
    if task != recipe.task:
        raise UserError(f"--data {data}: was prepared for {task}, and this architecture is for {recipe.task}")
    pair = pair_of(settings)
    if pair and pair != sides(recipe, dataset):
        raise UserError(f"{dataset}: --data {data} is {pair}; give that pair, or other data")


def pair_of(settings: Dict[str, str]) -> str:
    """The pair of languages in the settings of prepared data, such as en-de; empty where they are of another task."""
    return f"{settings['src']}-{settings['tgt']}" if "src" in settings else ""


def warn_of_warm_up(command: Sequence[str]) -> None:
    """Says so if a training ends before its learning rate is reached."""
    updates, warm_up = (number_of(flag, command) or 0 for flag in ("--max-update", "--warmup-updates"))
    if 0 < updates < warm_up:  # 0: no limit
        print(
            f"warning: --max-update {updates} is less than --warmup-updates {warm_up}: the model hardly learns; "
            f"give fewer, as in -- --warmup-updates {max(1, updates // 5)}",
            file=sys.stderr,
        )


def main(argv: Sequence[str]) -> None:
    own, rest = split_flags(argv)
    args = make_parser().parse_args(own)
    if not shutil.which("fairseq-train"):
        raise UserError("fairseq is not installed here; run scripts/setup.sh")
    name = args.recipe or recipe_name(args.arch, args.dataset)
    recipe = RECIPES[name]
    if recipe.task == "translation" and not re.fullmatch("[A-Za-z_]+-[A-Za-z_]+", sides(recipe, args.dataset)):
        raise UserError(f"{args.dataset}: a pair of languages is wanted, such as en-de")
    data = args.data or default_data(recipe, args.dataset)
    args.gpus = recipe.gpus if args.gpus is None else args.gpus
    set_threads(args.threads or recipe.threads)
    save = args.save_dir or ROOT / "runs" / f"{args.arch}-{args.dataset}-seed{args.seed}"
    if not dry_run():
        check_data(data, recipe, args.dataset, bool(args.data))
    rest = [*(init_flags(args.init, args.arch, data) if args.init else []), *rest]
    rest = [*length_flags(args.arch, recipe, data, rest, args.init), *rest]
    command = training_command(args, recipe, data, save, rest)
    warn_of_warm_up(command)
    # every machine of a run holds a lock of its own
    lock = ".lock" if args.nodes == 1 else f".lock.{socket.gethostname()}"
    with locked(save / lock, wait=False) as free:
        if not free:
            raise UserError(f"--save-dir {save}: another process is training there; let it end, or name another folder")
        settings = {"arch": args.arch, "pair": sides(recipe, args.dataset), "data": data.resolve(), "recipe": name}
        settings.update(batch_tokens=args.batch_tokens or recipe.batch_tokens, seed=args.seed, flags=" ".join(rest))
        pin_settings(save / "settings", "checkpoint_last.pt", settings)
        show(command)
        if dry_run():
            return
        provenance.note(save / "provenance.json", "cuda" if args.gpus else "cpu")
        log = save / ("train.log" if args.nodes == 1 else f"train.{socket.gethostname()}.log")
        # in this process' place, so that a signal sent to it reaches the training
        sys.stdout.flush()
        for stream in (1, 2):
            tee = subprocess.Popen(["tee", "-a", "-i", str(log)], stdin=subprocess.PIPE, stdout=stream)
            assert tee.stdin
            os.dup2(tee.stdin.fileno(), stream)
        os.execvp(command[0], command)
