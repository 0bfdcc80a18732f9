"""What a run measured, and how, as one JSON file. scripts/make_tables.py renders the tables from such files."""

import json
import re
import statistics
from pathlib import Path
from typing import Any, Dict, List, Optional

from .command import UserError
from .hyperparameters import RECIPES, Recipe
from .provenance import device_of, write_record
from .scoring import other_options, read_evaluation
from .tables import Cell

# `name=1`, `name 1` or `"name": "1"`: fairseq's log formats
FIELD = re.compile(r'(?:valid_)?([a-z_]+)"?(?:[=:] ?| )"?(-?[\d.]+(?:e[-+]?\d+)?|inf|nan)\b')


def log_lines(log: str, kind: str) -> List[Dict[str, float]]:
    """The fields of fairseq's lines of a kind (train_inner, train, valid), one for each number of updates.

    A resumed run repeats the updates after its last checkpoint: the last line counts.
    """
    lines = [line for line in log.splitlines() if f"| {kind} |" in line]
    found = [{name: float(value) for name, value in FIELD.findall(line)} for line in lines]
    by_updates = {fields["num_updates"]: fields for fields in found if "num_updates" in fields}
    return [by_updates[updates] for updates in sorted(by_updates)]


def read_log(log: str) -> Dict[str, Any]:
    """What a training's log says.

    - ``target_tokens_updates_x_wpb``: the number of updates times the mean number of target tokens in one.
    - ``minutes``: updates / median updates per second. So a pause does not count, and neither do
      programs that slow it down for a while, validation and saving.
    - ``curve``: on the validation set the criterion's loss, and what else is logged of perplexity and accuracy.
    """
    parameters = re.findall(r"num\. trained: ([\d,]+)", log)
    inner, outer, valid = (log_lines(log, kind) for kind in ("train_inner", "train", "valid"))
    lines = inner or outer
    if not parameters or not lines:
        what = "num_updates" if parameters else "'num. trained'"
        raise UserError(f"no line with {what}; this is no log of fairseq-train, or one that ended early")
    updates = int(max(fields["num_updates"] for fields in inner + outer + valid))
    speeds = [fields["ups"] for fields in lines if fields.get("ups")]
    curve: Dict[str, List[float]] = {"updates": [int(fields["num_updates"]) for fields in valid]}
    for name in ("loss", "ppl", "accuracy"):
        if all(name in fields for fields in valid):
            curve[f"valid_{name}"] = [fields[name] for fields in valid]
    return {
        "parameters": int(parameters[0].replace(",", "")),
        "updates": updates,
        "target_tokens_updates_x_wpb": round(updates * statistics.mean(fields["wpb"] for fields in lines)),
        "minutes": round(updates / statistics.median(speeds) / 60, 1) if speeds else None,
        "curve": curve,
    }


def learned_alpha(checkpoint: Path) -> Dict[str, Dict[str, List[float]]]:
    """{layer: {component: weight of each head}}: the mixtures' softmax of alpha; empty for other models.

    A layer whose heads are of different kinds has an entry for each group: ``encoder.layers.0.groups.1``.
    """
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu

    from fairseq_synth import register

    register()  # allows what fairseq's checkpoints hold
    return mixture_weights(load_checkpoint_to_cpu(str(checkpoint))["model"])


def mixture_weights(weights: Dict[str, Any]) -> Dict[str, Dict[str, List[float]]]:
    """`learned_alpha` of a state dict, which has alpha, (functions, H), before the softmax."""
    from fairseq_synth.attention import rename_older
    from fairseq_synth.synthesizers import SYNTHESIZERS

    found, weights = {}, dict(weights)
    rename_older(weights, "")
    pattern = r"(.*?((?:encoder|decoder)\.layers\.\d+)\.self_attn\.synthesizer(\.groups\.\d+)?\.)alpha"
    for match in filter(None, (re.fullmatch(pattern, key) for key in weights)):
        alpha, prefix = weights[match[0]], f"{match[1]}components."
        names = {key[len(prefix) :].split(".")[0] for key in weights if key.startswith(prefix)}
        if len(names) < len(alpha):
            names.add("vanilla")  # it has no weights of its own here
        heads = [[round(weight, 4) for weight in row] for row in alpha.float().softmax(0).tolist()]
        found[match[2] + (match[3] or "")] = dict(zip([name for name in SYNTHESIZERS if name in names], heads))
    return found


def check_evaluation(run: Path, data: Path, recipe: Recipe) -> None:
    """Refuses a run that was evaluated with options of its own, whose figures are not the recipe's."""
    for name, (value, wanted) in other_options(run, recipe).items():
        raise UserError(
            f"{run}: was evaluated with --{name.replace('_', '-')} {value}, and the recipe has {wanted}; "
            f"evaluate it again: scripts/evaluate.sh {data} {run}"
        )


def record(cell: Cell, out: Path, command: Optional[str] = None, changed: Optional[Path] = None) -> None:
    """Writes the JSON of a cell that is trained and scored.

    Args:
        out: the folder of its data and runs.
        command: what ran it (default: as in an earlier record, or the cell's own).
        changed: the folder of a run by another recipe; it is recorded there, and not as the cell.
    """
    table, run, first = cell.table, changed or cell.run(out), cell.init()
    recipe = RECIPES[cell.dataset.recipe]
    try:
        scores = json.loads((run / "scores.json").read_text())
        log = "\n".join(path.read_text(errors="replace") for path in sorted(run.glob("train*.log")))
        measured, starts = read_log(log), json.loads((run / "provenance.json").read_text())
        alpha = learned_alpha(run / recipe.checkpoint)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: no such file; train with train.sh and score with evaluate.sh") from None
    except UserError as error:
        raise UserError(f"{run}/train.log: {error}") from None
    result = run / "result.json" if changed else cell.result(device_of(starts[-1]["hardware"]))
    earlier = json.loads(result.read_text()) if result.exists() else {}
    flags = " ".join(table.training(cell.model)[1])
    baseline = cell._replace(model=table.baseline).run(out)
    # the baseline here has the table's recipe, a changed run another
    has_baseline = not changed and cell.model != table.baseline and (baseline / "scores.json").exists()
    is_compared = table.task.TEST and has_baseline
    for folder in [run, *([baseline] if is_compared else [])]:
        check_evaluation(folder, cell.data(out), recipe)
    commits = [*(start["commit"] for start in starts), read_evaluation(run).get("commit")]
    figures = {
        "table": table.name,
        "dataset": cell.dataset.name,
        "model": cell.model,
        "seed": cell.seed,
        **({"flags": flags} if flags else {}),
        **({"init": first.run(out).name} if first else {}),  # the run that it began with
        "command": command or earlier.get("command") or cell.command,
        "test_set": scores[table.metric(cell.dataset)].get("test_set"),
        "figures": {name: score["score"] for name, score in scores.items()},
        "signatures": {name: f"{score['name']}|{score['signature']}" for name, score in scores.items()},
        **({"significance": table.task.compare(cell.data(out), run, baseline)} if is_compared else {}),
        **measured,
        **({"alpha": alpha} if alpha else {}),
        **starts[-1],
        "hardware": "; ".join(dict.fromkeys(start["hardware"] for start in starts)),
        "commit": "; ".join(dict.fromkeys(filter(None, commits))),  # of the training, and of the evaluation
    }
    write_record(result, figures)
    (run / "recorded").touch()
