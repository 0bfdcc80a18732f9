"""Trains an architecture on prepared data: on this machine's GPUs, on those of several machines, or on its CPU.

  scripts/train.sh ARCH DATASET [options] [-- flags for fairseq-train]

  ARCH      transformer_synth_random_vanilla_wmt_en_de and the like, or fairseq's own: transformer_wmt_en_de,
            transformer_wmt_en_de_big, transformer_multi30k. Its ending and DATASET choose the recipe.
            Language models: transformer_lm_synth_random_ptb, transformer_lm_ptb; classifiers:
            roberta_synth_dense_agnews, roberta_imdb; from text to text: transformer_synth_random_t5_tiny
  DATASET   en-de or en-fr, or a corpus of prepare.sh for the task: ptb, agnews, aeslc, wikitext2_spans, …. With --data
            any name; for translation a pair of languages all the same

The batch stays the same for any number of GPUs: --update-freq and, where it does not divide, --max-tokens follow.
Stop it at any time; the same command goes on from the last checkpoint. DRY_RUN=1 shows the command only.

Where the text has longer sentences than the architecture takes, --synth-max-length is raised to their length,
and this is printed.
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
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from fairseq_synth.names import VARIANTS

from . import provenance
from .command import (
    ROOT,
    Parser,
    UserError,
    dry_run,
    folder,
    integer,
    locked,
    pin_settings,
    read_settings,
    show,
    split_flags,
    started,
)
from .corpora import CORPORA
from .hyperparameters import RECIPES, Recipe, number_of
from .prepare import digest_of

LONGEST = 1024  # tokens of a sentence: fairseq's --max-source-positions and --max-target-positions by default
LAST = "checkpoint_last.pt"  # what a training goes on from
LENGTH_UNIT = 8  # a length that follows the text is a multiple of it, as the products of GPUs like it
# options whose default is the recipe's value
FROM_RECIPE = "gpus threads batch_tokens max_tokens max_update save_every".split()
# flags of fairseq-train, and the argument of train.sh that says the same
SAID = {
    "--arch": "ARCH",
    "-a": "ARCH",
    "--source-lang": "DATASET",
    "-s": "DATASET",
    "--target-lang": "DATASET",
    "-t": "DATASET",
}
# flags of fairseq-train that say how large a model is, and what else a second stage takes over from the first
SIZE = r"--(?:(?:encoder|decoder)-(?:layers|embed-dim|ffn-embed-dim|attention-heads)|synth-max-length)"
TAKEN_OVER = rf"({SIZE}|--synth-beyond-length)[= ](\S+)"
# runs a command in the shell's place with its output shown and added to a file, so that a signal reaches the command.
# What writes the log gives the lock up, as it may end later than the training
TEE = 'exec "${{@:2}}" > >(exec tee -ai "$1" {lock}>&-) 2> >(exec tee -ai "$1" >&2 {lock}>&-)'


def make_parser() -> Parser:
    """The options of train.sh."""
    parser = Parser("train", __doc__)
    add = parser.add_argument
    number = functools.partial(add, type=integer(1), metavar="N")
    add("arch", metavar="ARCH")
    add("dataset", metavar="DATASET")
    add("--recipe", choices=RECIPES, help="default: by the ending of ARCH and by DATASET")
    where = "prepared data (default: data/DATASET; data/wmt14-PAIR, data/multi30k-PAIR)"
    add("--data", type=folder, metavar="DIR", help=where)
    add("--save-dir", type=folder, metavar="DIR", help="checkpoints and the log (default: runs/ARCH-DATASET-seedN)")
    number("--gpus", type=integer(0), help="of this machine (default: the recipe's: all or none); 0 trains on the CPU")
    number("--processes", default=1, help="with --gpus 0, how many (default: 1)")
    number("--threads", help="CPU threads of each process (default: the recipe's, or OpenMP's)")
    number("--nodes", default=1, help="machines; call the script on each, with --rendezvous")
    add("--rendezvous", default="", metavar="HOST:PORT", help="with --nodes: the first machine and a free port on it")
    number("--timeout", default=600, help="seconds without progress that end the run")
    tokens = "tokens of one update, all processes together (default: the recipe's). A sentence counts "
    number("--batch-tokens", help=tokens + "as the longer of its sides, and as the longest of its batch")
    number("--max-tokens", help="most tokens of a pass in one process (default: the recipe's)")
    number("--max-update", help="updates (default: the recipe's)")
    saved = "updates between checkpoints (default: the recipe's); the last 10 are kept, or 1 if none are averaged"
    number("--save-every", help=saved)
    precision = "(default: bf16 where the GPU computes in it, else fp16; CPU fp32)"
    add("--precision", choices=("fp32", "fp16", "bf16"), help=precision)
    number("--seed", type=integer(0), default=1, help="(default: 1)")
    add("--init", type=Path, metavar="RUN_DIR", help="begin with the weights of that run (data: prepare.sh --like)")
    return parser


def models() -> List[str]:
    """Every model by the name that the tables have for it, fairseq's own first."""
    return ["transformer", *(variant.replace("+", "_") for variant in VARIANTS if variant != "vanilla")]


def recipe_name(arch: str, dataset: str = "") -> str:
    """The recipe of an architecture's ending: that of the data set, of a table that has the data set, or any.

    Of several the one of the longest ending, as one ends in another.
    """
    from .tables import TABLES  # which is built of this module

    fitting = [name for name in RECIPES if arch.endswith(f"_{RECIPES[name].preset}")]
    if not fitting:
        endings = dict.fromkeys(recipe.preset for recipe in RECIPES.values())
        raise UserError(f"{arch}: no recipe; an architecture that ends in {' or '.join(endings)} has one")
    of_tables = {column.recipe for table in TABLES.values() for column in table.datasets if column.name == dataset}
    order = {name: (RECIPES[name].corpus != dataset, name not in of_tables) for name in fitting}
    return min(fitting, key=lambda name: (*order[name], -len(RECIPES[name].preset)))


def check_architecture(arch: str) -> None:
    """Refuses a Synthesizer of a variant that does not exist."""
    if not any(arch.endswith(f"_{recipe.preset}") for recipe in RECIPES.values()):
        return  # a preset that has no recipe; fairseq-train knows its architectures
    known, architecture = [*models()[1:], "vanilla"], RECIPES[recipe_name(arch)].architecture
    if "_synth_" in arch and arch not in map(architecture, known):
        raise UserError(f"{arch}: no such architecture; {architecture('NAME')} are there for {', '.join(known)}")


def gpus_here() -> Tuple[int, str]:
    """The GPUs of this machine, and the half precision that they compute in."""
    import torch

    n = torch.cuda.device_count()
    return n, "bf16" if n and torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def longest_sentence(data: Path, most: int = LONGEST) -> int:
    """Tokens of the longest sentence of binarised data, its end included; 0 where there are none yet.

    Training sentences of more than `most` are not counted, as fairseq skips them; others are refused. The lengths stand
    at the head of fairseq's .idx files: 18 bytes of names, their number, and a 32-bit integer each.
    """
    longest = 0
    for path in sorted((data / "bin").glob("*.idx")):
        with open(path, "rb") as file:
            (number,) = struct.unpack("<18xQ", file.read(26))
            sizes = array("i", file.read(4 * number))
        split, _, lang, _ = path.name.split(".")
        for line, size in enumerate(sizes, 1):
            if size <= most:
                longest = max(longest, size)
            elif split != "train":
                raise UserError(
                    f"{data}: line {line} of {split}.{lang} has {size} tokens, and a model takes {most}; split it, and "
                    "prepare the data again, or give -- --max-source-positions and --max-target-positions"
                )
    return longest


def best_checkpoint(run_dir: Path, flag: str = "") -> Path:
    """The average that the last evaluation has made, else the best checkpoint. `flag`: the option with this run."""
    average, best, last = (run_dir / f"checkpoint_{name}.pt" for name in ("avg", "best", "last"))
    path = average if average.exists() else best
    if path == average and last.exists() and last.stat().st_mtime > average.stat().st_mtime:
        print(f"warning: {average} is older than {last.name}; evaluate.sh averages anew", file=sys.stderr)
    if not path.exists() and not dry_run():
        raise UserError(f"{flag}{run_dir}: has no {best.name}; name a run of train.sh that has come to a validation")
    return path


def init_flags(init: Path, arch: str, data: Path, rest: Sequence[str], save: Path) -> List[str]:
    """The flags that begin a training with the weights of another run, and with its sizes. `rest`: the training's.

    `save`: the folder of the training. Where that goes on, the checkpoint is the one that it began with, although the
    first run may have another one by now.
    """
    found = read_settings(init / "settings")
    check_data(init, Path(found.get("data", data)))
    if found.get("arch", arch) != arch:
        raise UserError(f"--init {init}: is a run of {found['arch']}, not of {arch}")
    for words in (data / "bin").glob("dict.*.txt"):
        other = Path(found.get("data", data)) / "bin" / words.name
        if not other.exists() or other.read_bytes() != words.read_bytes():
            raise UserError(f"--init {init}: {data} has other words; prepare them by prepare.sh --like {found['data']}")
    own = dict(re.findall(TAKEN_OVER, found.get("flags", "")))
    for flag, value in re.findall(rf"({SIZE})[= ](\S+)", " ".join(rest)):
        if own.get(flag) != value and not dry_run():
            raise UserError(f"--init {init}: has {flag} {own.get(flag, 'of its architecture')}; leave {flag} out")
    flags = read_settings(save / "settings").get("flags", "")
    paths = [(init / f"checkpoint_{name}.pt").resolve() for name in ("avg", "best")]
    begun = [path for path in paths if f"--finetune-from-model {path} " in f"{flags} "]
    path = begun[0] if begun and (save / LAST).exists() else best_checkpoint(init, "--init ").resolve()
    return ["--finetune-from-model", str(path), *(word for flag in own.items() for word in flag)]


def length_flags(arch: str, recipe: Recipe, data: Path, rest: Sequence[str], init: Optional[Path]) -> List[str]:
    """The flag ``--synth-max-length`` for text with longer sentences than the preset takes, and says so.

    `rest`: flags for fairseq-train; what they say of the length is kept. `init`: the run to begin with, whose length
    cannot change.
    """
    longest, usual = 0, recipe.max_length
    if recipe.task == "translation" and "_synth_" in arch:
        longest = longest_sentence(data, number_of("--max-source-positions", rest) or LONGEST)
        usual = usual if arch.endswith(f"_{recipe.preset}") else max_length_of(arch)
    most = number_of("--synth-max-length", rest) or usual
    if longest <= min(most, usual) or not has_max_length(arch, rest):
        return []
    length = math.ceil(longest / LENGTH_UNIT) * LENGTH_UNIT
    if init and longest > most and not re.search(r"--synth-beyond-length[= ]tile\b", " ".join(rest)):
        mend = f"train that run with -- --synth-max-length {length}, leave the sentence out, or "
        mend += "give -- --synth-beyond-length tile"
        raise UserError(f"--init {init}: takes up to {most} tokens, and {data} has a sentence of {longest}; {mend}")
    own = ("--synth-max-length", "--synth-beyond-length")
    if longest <= usual or any(word.split("=")[0] in own for word in rest):
        return []
    print(
        f"--synth-max-length {length}: the longest sentence of {data} has {longest} tokens, and {arch} takes "
        f"{usual} by default. After -- you may give another one, or --synth-beyond-length tile"
    )
    return ["--synth-max-length", str(length)]


def max_length_of(arch: str) -> int:
    """--synth-max-length of an architecture by default."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    import fairseq_synth
    from fairseq_synth.config import SynthesizerConfig

    fairseq_synth.register()
    args = argparse.Namespace()
    if arch in ARCH_CONFIG_REGISTRY:  # fairseq-train refuses others
        ARCH_CONFIG_REGISTRY[arch](args)
    return int(getattr(args, "synth_max_length", SynthesizerConfig().synth_max_length))


def has_max_length(arch: str, rest: Sequence[str]) -> bool:
    """Whether a function of a Synthesizer takes sentences up to a length only. `rest`: flags for fairseq-train."""
    from fairseq_synth.synthesizers import SYNTHESIZERS

    specs = re.findall(r"--(?:en|de)coder-synthesizer[= ](\S+)", " ".join(rest))
    if len(specs) < 2:  # the architecture says the other side's, or both
        known = (variant for variant in VARIANTS if f"_synth_{variant.replace('+', '_')}_" in arch)
        specs.append(max(known, key=len, default="random"))
    names = re.findall("[a-z_]+", " ".join(specs))
    return any(SYNTHESIZERS[name].has_max_length for name in names if name in SYNTHESIZERS)


def check_devices(args: argparse.Namespace) -> None:
    """Refuses GPUs and precisions that are not there; fills in those that are not given."""
    best = "fp32"
    if args.gpus != 0:
        found, best = gpus_here()
        if args.gpus is None and not found:
            raise UserError("--gpus: none found here; --gpus 0 trains on the CPU, and for DRY_RUN=1 any number will do")
        args.gpus = args.gpus or found
        if args.gpus > found and not dry_run():
            raise UserError(f"--gpus {args.gpus}: this machine has {found}")
        if args.processes != 1:
            raise UserError(f"--processes {args.processes}: is for --gpus 0; every GPU has one process")
    elif args.precision == "fp16":
        raise UserError("--precision fp16: needs a GPU; on a CPU choose fp32 or bf16")
    args.precision = args.precision or best
    if args.nodes > 1 and ":" not in args.rendezvous:
        raise UserError(f"--nodes {args.nodes}: needs --rendezvous HOST:PORT, the first machine and a free port of it")


def words_of(flags: Mapping[str, object]) -> List[str]:
    """Flags as words of a command; None stands for a flag without a value."""
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value) if word is not None]


def training_command(args: argparse.Namespace, recipe: Recipe, data: Path, save: Path, rest: List[str]) -> List[str]:
    """The fairseq-train command, under torchrun where there are several processes; fills in options not given."""
    for name in FROM_RECIPE:
        if getattr(args, name) is None:
            setattr(args, name, getattr(recipe, name))
    check_devices(args)
    processes = args.gpus or args.processes
    world = args.nodes * processes
    passes = math.ceil(args.batch_tokens / (world * args.max_tokens))  # of an update: as few as fit
    tokens = args.batch_tokens // (world * passes)
    longest = max(recipe.max_length, number_of("--synth-max-length", rest) or 0)
    if args.max_tokens < longest:
        raise UserError(f"--max-tokens {args.max_tokens}: is less than a sentence of {longest}; raise it")
    if tokens < longest:
        left = f"leaves {tokens} for each of {world} processes at a time"
        raise UserError(f"--batch-tokens {args.batch_tokens}: {left}, less than a sentence of {longest}; raise it")
    flags: Dict[str, object] = {"user-dir": ROOT / "fairseq_synth", "arch": args.arch}
    if recipe.task == "translation":
        flags["source-lang"], flags["target-lang"] = sides(recipe, args.dataset).split("-")
    else:
        flags["task"] = recipe.task
    flags.update({"save-dir": save, "seed": args.seed, "max-update": args.max_update})
    flags.update({**recipe.flags, **count_classes(recipe, data)})
    if args.save_every:
        flags.update({"save-interval-updates": args.save_every, "no-epoch-checkpoints": None})
        flags["keep-interval-updates"] = 10 if recipe.average else 1  # beside the best
    else:
        flags.update({"keep-last-epochs": 10, "patience": 10})
    if not args.gpus:
        flags["cpu"] = None
    if args.precision != "fp32":
        flags[args.precision] = None
    # without the last fairseq counts this machine's GPUs: too many for --gpus 1, and with one in each of several
    # machines each would train by itself
    flags.update({"max-tokens": tokens, "update-freq": passes, "distributed-world-size": world})
    launch = ["fairseq-train"]
    if world > 1:
        torchrun: Dict[str, object] = {"standalone": None}
        if args.nodes > 1:
            torchrun = {"nnodes": args.nodes, "rdzv-backend": "c10d", "rdzv-endpoint": args.rendezvous}
            torchrun["rdzv-id"] = f"{args.arch}-{args.dataset}-{args.seed}"
        torchrun.update({"nproc-per-node": processes, "max-restarts": 0, "no-python": None})
        program = "fairseq-train" if args.gpus else str(ROOT / "scripts" / "cpu_worker.sh")
        launch = ["torchrun", *words_of(torchrun), program]
        flags["heartbeat-timeout"] = args.timeout
    flags.update({"no-progress-bar": None, "log-interval": 100})
    return [*launch, str(data / "bin"), *words_of(flags), *rest]


def sides(recipe: Recipe, dataset: str) -> str:
    """The pair of languages, or of texts, of a data set."""
    return dataset if "-" in dataset else recipe.pair or dataset


def count_classes(recipe: Recipe, data: Path) -> Dict[str, int]:
    """The flag ``num-classes`` for the labels of prepared data; the recipe's stands where there are none yet."""
    labels = data / "bin" / "label" / "dict.txt"
    if recipe.task != "sentence_prediction" or not labels.exists():
        return {}
    lines = labels.read_text(encoding="utf-8").splitlines()
    return {"num-classes": sum(not line.startswith("madeupword") for line in lines)}  # fairseq fills up to 8


def set_threads(threads: Optional[int]) -> None:
    """Gives this process and those it starts a number of CPU threads; None leaves it as it is."""
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def keep_memory() -> None:
    """Lets the programs that this process starts reuse memory that they have freed.

    A training on a CPU needs the same large blocks in every update. By default glibc returns them to the system, which
    fills each new one with zeros.
    """
    os.environ.setdefault("MALLOC_MMAP_MAX_", "0")  # large blocks come from the heap too
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**40))  # bytes: the heap never shrinks


def start(argv: Sequence[object], show_line: Optional[Callable[[str], None]] = None) -> None:
    """train.sh in a process of its own, as the training takes its place. `show_line`: prints a line of its log."""
    words = list(map(str, argv))
    if dry_run():
        return main(words)
    out, errors = (subprocess.PIPE, subprocess.STDOUT) if show_line else (None, None)
    command = [sys.executable, ROOT / "scripts" / "recipe.py", "train", *words]
    path = os.environ.get("PYTHONPATH")  # fairseq may be there
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}
    with started(command, env=env, stdout=out, stderr=errors) as process:
        if process.stdout and show_line:
            for line in process.stdout:
                show_line(line)
    if process.returncode:
        log = Path(words[words.index("--save-dir") + 1]) / "train.log"
        raise UserError(f"the training failed; see {log}. The same call goes on from its last checkpoint")


def find_data(named: Optional[Path], recipe: Recipe, dataset: str) -> Path:
    """The folder of prepared data, of --data or below data/. Refuses data not prepared, or for another task."""
    languages = recipe.task == "translation" and not recipe.pair
    kinds = {"language_modeling": ("text",), "sentence_prediction": ("labels",)}.get(recipe.task, ("pairs", "spans"))
    known = ["en-de", "en-fr"] if languages else [name for name in CORPORA if CORPORA[name].kind in kinds]
    if not named and dataset not in known:
        others = "for others name what prepare.sh made by --data"
        raise UserError(f"{dataset}: {', '.join(known)} have data of their own; {others}")
    data = named or ROOT / "data" / (f"{recipe.corpus}-{dataset}" if languages else dataset)
    if dry_run():
        return data
    if not (data / "bin" / "done").exists():
        own = {"text": "lm", "labels": "classification", "spans": "spans"}  # corpora of a user's own text, by kind
        kind = CORPORA[recipe.corpus].kind if recipe.corpus in CORPORA else ""
        how = f"RAW_DIR {sides(recipe, dataset).replace('-', ' ')} {data}"
        if kind in own:
            how = f"{own[kind]} {data} --from RAW_DIR"
        if dataset in CORPORA:
            how = f"{dataset} {data}"
        elif not named:
            how = f"{recipe.corpus} {dataset.split('-')[-1]} {data}"
        raise UserError(f"--data {data}: not prepared, or not to its end; run scripts/prepare.sh {how}")
    settings = read_settings(data / "settings")
    pair = pair_of(settings)
    # what is written from text is one task of fairseq's
    task = "translation" if pair else settings.get("task", "translation")
    if task != recipe.task:
        raise UserError(f"--data {data}: was prepared for {task}, and this architecture is for {recipe.task}")
    if pair and pair != sides(recipe, dataset):
        raise UserError(f"{dataset}: --data {data} is {pair}; give that pair, or other data")
    return data


def check_data(run_dir: Path, data: Path) -> None:
    """Refuses data that are not those of a run, or were made anew with other settings or words since."""
    settings, now = read_settings(run_dir / "settings"), digest_of(data)
    if settings.get("data", str(data.resolve())) != str(data.resolve()):
        raise UserError(
            f"{run_dir}: was trained on {settings['data']}, not on {data}; if that folder was moved, mend its name in "
            f"{run_dir}/settings"
        )
    if data.exists() and settings.get("data_digest", now) != now:
        raise UserError(
            f"{run_dir}: {data} was made anew since, with other settings or words; train in another folder, or prepare "
            "the data as they were"
        )


def schedule(command: Sequence[str]) -> str:
    """The updates that the learning rate's schedule ends with, where it follows --max-update; else nothing."""
    words = " ".join(command)
    is_cosine = re.findall(r"--lr-scheduler[= ](\w+)", words)[-1:] == ["cosine"]
    return str(number_of("--max-update", command)) if is_cosine and "--lr-period-updates" not in words else ""


def pair_of(settings: Dict[str, str]) -> str:
    """The pair of languages in the settings of prepared data, such as en-de; empty where they are of another task."""
    return f"{settings['src']}-{settings['tgt']}" if "src" in settings else ""


def warn_of_warm_up(command: Sequence[str]) -> None:
    """Says so if a training ends before its learning rate is reached."""
    updates, warm_up = (number_of(flag, command) or 0 for flag in ("--max-update", "--warmup-updates"))
    if 0 < updates < warm_up:  # 0: no limit
        advice = f"the model hardly learns; give fewer, as in -- --warmup-updates {max(1, updates // 5)}"
        print(f"warning: --max-update {updates} is less than --warmup-updates {warm_up}: {advice}", file=sys.stderr)


def main(argv: Sequence[str]) -> None:
    own, rest = split_flags(argv)
    parser = make_parser()
    args = parser.parse_args(own)
    for flag in (word.split("=")[0] for word in rest):
        if flag in SAID:
            raise UserError(f"-- {flag}: {SAID[flag]} says it; leave it out")
        if flag in parser.options() and flag != "--max-tokens":  # the quickstart takes that one only after --
            raise UserError(f"-- {flag}: give it before --")
    if not shutil.which("fairseq-train"):
        raise UserError("fairseq is not installed here; run scripts/setup.sh")
    name = args.recipe or recipe_name(args.arch, args.dataset)
    check_architecture(args.arch)
    recipe, pair = RECIPES[name], sides(RECIPES[name], args.dataset)
    if recipe.task == "translation" and not re.fullmatch(r"\w+-\w+", pair):
        raise UserError(
            f"{args.dataset}: a pair of languages is wanted, such as en-de; for other text give --recipe, such as "
            "--recipe pairs_cpu"
        )
    data = find_data(args.data, recipe, args.dataset)
    save = args.save_dir or ROOT / "runs" / f"{args.arch}-{args.dataset}-seed{args.seed}"
    if (save / "bin").exists():
        raise UserError(f"--save-dir {save}: is a folder of data; name another one")
    if args.init:
        rest = [*init_flags(args.init, args.arch, data, rest, save), *rest]
    rest = [*length_flags(args.arch, recipe, data, rest, args.init), *rest]
    command = training_command(args, recipe, data, save, rest)
    warn_of_warm_up(command)
    set_threads(args.threads)
    if not args.gpus:
        keep_memory()
    machine = f".{socket.gethostname()}" if args.nodes > 1 else ""  # each of a run has a lock and a log of its own
    with locked(save / f".lock{machine}", wait=False) as lock:
        if not lock:
            raise UserError(f"--save-dir {save}: another process is training there; let it end, or name another folder")
        settings = {"arch": args.arch, "pair": pair, "data": data.resolve(), "data_digest": digest_of(data)}
        settings.update(recipe=name, recipe_flags=" ".join(words_of(recipe.flags)), flags=" ".join(rest))
        settings.update(batch_tokens=args.batch_tokens, seed=args.seed, precision=args.precision)
        settings.update(max_update=schedule(command))
        if (save / LAST).exists():
            check_data(save, data)
        pin_settings(save / "settings", "checkpoint*.pt", settings)
        show(command)
        if not dry_run():
            log, origin = save / f"train{machine}.log", save / "provenance.json"
            if not (save / LAST).exists():  # begins anew: what an earlier training has left says nothing of this one
                for path in (log, origin, save / "scores.json", *save.glob("tests/*/scores.json")):
                    path.unlink(missing_ok=True)
            processes = args.nodes * (args.gpus or args.processes)
            provenance.note(origin, "cuda" if args.gpus else "cpu", processes, args.precision)
            os.execvp("bash", ["bash", "-c", TEE.format(lock=lock), "bash", str(log), *command])
