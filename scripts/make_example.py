#!/usr/bin/env python
"""Copies the trained model of a run into a small folder that you can share.

    scripts/make_example.py RUN_DIR OUT_DIR
    scripts/make_example.py runs/multi30k_cpu-en-fr-relative_random_vanilla-seed1 examples/multi30k-en-fr

RUN_DIR is a run of train.sh for pairs of text that evaluate.sh has scored. OUT_DIR contains the scored checkpoint in
half precision, without the state of the optimizer, the subword model, the dictionaries and a model card (README.md).
OUT_DIR contains no text of the corpus and no paths of this machine. You can give OUT_DIR to translate.sh.
"""

import argparse
import logging
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.catalog import TABLES, Run  # noqa: E402
from recipes.prepare import digest_of_data  # noqa: E402
from recipes.steps import ROOT, UserError, atomic_write, dump, load, write  # noqa: E402
from recipes.train import best_checkpoint, read_data_settings, read_run  # noqa: E402

DATA = "prepared"  # the name of the folder with the subword model and the dictionaries
SUBWORD_MODELS = ("codes", "pieces.model")


def main() -> None:
    """Makes the folder OUT_DIR from the run RUN_DIR, which the command line names.

    Raises UserError if the run is not for pairs of text or has no scores, or if OUT_DIR exists.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run of train.sh that evaluate.sh has scored")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="the new folder")
    args = parser.parse_args()
    run = read_run(args.run)
    settings = read_data_settings(run.data)
    scores = load(run.folder / "evaluation" / "scores.json")
    if "src" not in settings:
        raise UserError(f"{run.folder}: was trained for {settings['task']}; use a run for pairs of text")
    if not scores:
        raise UserError(f"{run.folder}: was not scored; call scripts/evaluate.sh {run.folder} first")
    if args.out.exists():
        raise UserError(f"{args.out}: exists already; remove it, or name another folder")
    with atomic_write(args.out) as (unfinished_folder,):
        unfinished_folder.mkdir()
        copy_data(run.data, settings, unfinished_folder / DATA)
        write_run(run, unfinished_folder)
        write_checkpoint(best_checkpoint(run.folder), unfinished_folder / "checkpoint_best.pt")
        card = write_model_card(run, settings, scores, args.out)
        write(unfinished_folder / "README.md", card)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"wrote {args.out}, {size / 1e6:.1f} MB")
    print(f'next: echo "..." | scripts/translate.sh {shlex.quote(str(args.out))}')


def copy_data(data: Path, settings: dict[str, Any], out: Path) -> None:
    """Copies what is needed to translate other text: settings, subword model and dictionaries, but no text.

    Args:
        data: a folder that prepare.sh has made.
        settings: the contents of its settings.json.
        out: the folder to make.
    """
    (out / "bin").mkdir(parents=True)
    for name in SUBWORD_MODELS:
        if (data / name).exists():
            shutil.copyfile(data / name, out / name)
    for dictionary in (data / "bin").glob("dict.*.txt"):
        shutil.copyfile(dictionary, out / "bin" / dictionary.name)
    dump(out / "settings.json", without_folders(settings))
    (out / "bin" / "done").touch()  # marks a folder whose preparation is complete


def write_run(run: Run, out: Path) -> None:
    """Writes the file run.json of the new folder, so that translate.sh can use the folder like a run of train.sh."""
    record = {
        "arch": run.arch,
        "data": DATA,
        "data_digest": digest_of_data(out / DATA),
        "seed": run.seed,
        "flags": run.flags,
        "recipe": asdict(run.recipe),
    }
    dump(out / "run.json", record)


def write_checkpoint(checkpoint: Path, out: Path) -> None:
    """Copies a checkpoint with its weights in half precision, and without what only a training needs.

    Args:
        checkpoint: the file to read.
        out: the file to write.
    """
    import torch
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu
    from omegaconf import OmegaConf

    from fairseq_synth import register

    register()  # allows torch to load what fairseq's checkpoints hold
    state = load_checkpoint_to_cpu(str(checkpoint))
    small_weights: dict[str, torch.Tensor] = {}
    for name, weight in state["model"].items():
        small_weight = weight.half() if weight.is_floating_point() else weight
        # An average of checkpoints has a copy of a shared embedding matrix for each of its names. torch stores the
        # matrix only once if the same tensor is used for all names.
        equal_tensors = [other for other in small_weights.values() if torch.equal(other, small_weight)]
        small_weights[name] = equal_tensors[0] if equal_tensors else small_weight
    # fairseq saves the configuration in this form
    config = OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True)
    small_state = {
        "cfg": without_folders(config),
        "args": None,
        "model": small_weights,
        "optimizer_history": without_folders(state["optimizer_history"]),
        "extra_state": {"epoch": state["extra_state"]["train_iterator"]["epoch"]},
        "last_optimizer_state": None,
    }
    torch.save(small_state, out)


def without_folders(value: Any) -> Any:
    """Returns a copy of a value in which each absolute path, such as "/home/me/data", is replaced by its last part.

    The value may be a string, or nested dictionaries, lists and namespaces that contain strings.
    """
    if isinstance(value, dict):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**without_folders(vars(value)))
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name
    return value


# The model card calls these scores of evaluate.sh by another name than scores.json does.
SCORE_LABELS = {
    "tokenised": "BLEU of tokenised text",
    "compound_split": "BLEU with split compounds",
    "round_trip": "BLEU that a perfect translation would have",
}


def write_model_card(run: Run, settings: dict[str, Any], scores: dict[str, Any], out: Path) -> str:
    """Returns the text of README.md: what the model is, how well it translates, and how it is used and was made.

    Args:
        run: the run that trained the model.
        settings: the settings.json of its data.
        scores: the scores.json of its evaluation.
        out: the folder that gets the README.md.
    """
    pair = f"{settings['src']}-{settings['tgt']}"
    subwords = "SentencePiece" if settings["subwords"] == "sentencepiece" else "BPE"
    corpus = "text of one's own" if settings["corpus"] == "own" else settings["corpus"]
    case = ", in lower case" if settings["lowercase"] else ""
    # the folder in the commands: inside this project, or only its name, since the card names no folders of this machine
    absolute_out = out.resolve()
    folder = absolute_out.relative_to(ROOT) if absolute_out.is_relative_to(ROOT) else Path(out.name)
    lines = [
        f"# A small model that translates {pair}",
        "",
        f"The architecture of the model is `{run.arch}`. The model was trained on {corpus} with {subwords}{case}. The "
        "weights are stored in half precision, without the state of the optimizer. `scripts/evaluate.sh` computed the "
        "following scores on the test set, before the weights were rounded:",
        "",
        *list_scores(scores),
        "",
        f"The model was trained by `{training_command(run)}` at commit {scores['commit'] or 'unknown'}.",
        "",
        "```bash",
        f'echo "..." | scripts/translate.sh {folder}',
        f"python -m fairseq_synth.inspect {folder}/checkpoint_best.pt --out pictures",
        f"scripts/prepare.sh DIR {settings['src']} {settings['tgt']} data/mine --like {folder}/{DATA}  # for convert",
        "```",
    ]
    return "\n".join(lines) + "\n"


def list_scores(scores: dict[str, Any]) -> list[str]:
    """Returns a line of the model card for each score, with the signature that says how it was computed."""
    lines = []
    for name, metric in scores["figures"].items():
        if metric["score"] is not None:
            label = SCORE_LABELS.get(name, metric["name"])
            lines.append(f"- {label}: {metric['score']:g} (`{metric['signature']}`)")
    return lines


def training_command(run: Run) -> str:
    """Returns the command that trains this run again.

    If the run belongs to a table of recipes/tables.yaml, this is a command of reproduce.sh, otherwise of train.sh.
    """
    folder_name = run.folder.resolve().name
    for table in TABLES.values():
        for cell in table.cells(seeds=[run.seed]):  # a cell of a table is one training
            if folder_name == f"{table.name}-{cell.name}":
                return f"{cell.command} --rerun"
    words = ["scripts/train.sh", "DATA_DIR", run.model, "--recipe", run.recipe.name, "--seed", str(run.seed)]
    if run.flags:
        words += ["--", *run.flags]
    return shlex.join(words)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq's messages about optional packages
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed here; run scripts/setup.sh, then source .venv/bin/activate")
