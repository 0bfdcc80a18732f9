"""What attention has learned in the models of a table, by `python -m fairseq_synth.inspect`: JSON, pictures, tables.

  scripts/analyse.sh TABLE [options]

Runs the inspection on the trained cells of a table that have none yet, and keeps what docs/analysis.md shows in
results/analysis/TABLE-PAIR-VARIANT-seedN.json. All pictures of each model are in OUT/analysis. With --lengths it
measures only loss and BLEU by sentence length, on the whole test set, and keeps them in results/lengths. Then
scripts/make_tables.py renders the page.
"""

import json
import shutil
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence

from fairseq_synth.inspect.drawing import Call, Panel, Picture, color, image, legend, line, name_above, stairs
from fairseq_synth.inspect.pictures import GROUPS, by_group

from . import provenance, render
from .command import ROOT, Parser, UserError, dry_run, integer, run, say, write
from .hyperparameters import BASELINES, RECIPES
from .render import Column, label, markdown, of_models, origin
from .tables import BASELINE, TABLES, Cell

Figures = Dict[str, Any]
Drawing = Callable[[Figures, str, str, str], List[Call]]  # record, choice, model and its color -> calls
FOLDER = "analysis"  # of results/, and of the pictures below --out
LENGTHS = "lengths"  # the same for --lengths
TABLE = "multi30k_cpu"  # that docs/analysis.md shows
SIZE = 16  # rows and columns of a pattern that are kept
MEANS = ("entropy", "diagonal", "neighbours", "word_dependence")
OF_HEADS = {  # title: what is summed
    "entropy (nats)": ("entropy",),
    "weight on the token and its neighbours": ("diagonal", "neighbours"),
    "dependence on words": ("word_dependence",),
    "importance by gradient (nats a token)": ("gradient",),
}


def main(argv: Sequence[str]) -> None:
    parser = Parser("analyse", __doc__)
    add = parser.add_argument
    add("table", metavar="TABLE", choices=TABLES)
    add("--pair", type=str.split, metavar="PAIRS", help="(default: all)")
    add("--variant", type=str.split, metavar="NAMES", help="(default: all)")
    add("--seed", type=integer(0), default=1, metavar="N", help="(default: 1)")
    add("--sentences", type=integer(1), metavar="N", help="of the validation set (default: 200)")
    add("--lengths", action="store_true", help="only loss and BLEU by sentence length, on the whole test set")
    add("--out", type=Path, default=ROOT, metavar="DIR", help="data and runs (default: the project's folder)")
    args = parser.parse_args(argv)
    if args.lengths and args.sentences:
        raise UserError("--lengths takes the whole test set; leave --sentences out")
    for cell in TABLES[args.table].cells(args.pair, args.variant, [args.seed]):
        if cell.model in BASELINES:  # no attention that the inspection knows
            continue
        checkpoint = cell.run(args.out) / RECIPES[cell.dataset.recipe].checkpoint
        if checkpoint.exists():
            measure(cell, checkpoint, args)
        else:
            say(f"{cell.name}: not trained, {checkpoint} is missing")


def measure(cell: Cell, checkpoint: Path, args: Namespace) -> None:
    """Inspects a cell's checkpoint, unless that is done, and writes its record."""
    kind, flags = FOLDER, f"--subset valid --sentences {args.sentences or 200}"
    if args.lengths:
        kind, flags = LENGTHS, "--subset test --only lengths --no-pictures"
    name = f"{cell.table.name}-{cell.name}"
    folder = args.out / kind / name
    done = folder / "origin.json"
    if not done.exists() or done.stat().st_mtime < checkpoint.stat().st_mtime:
        if folder.exists() and not dry_run():
            shutil.rmtree(folder)  # of an inspection cut off, or of an earlier training
        python = [sys.executable, "-m", "fairseq_synth.inspect"]
        run([*python, checkpoint, "--data", cell.data(args.out) / "bin", *flags.split(), "--out", folder])
        if dry_run():
            return
        write(done, json.dumps(provenance.here()) + "\n")
    (found,) = json.loads((folder / "figures.json").read_text(encoding="utf-8")).values()
    if not args.lengths:  # of an inspection that was done before
        flags = f"--subset {found['data']['subset']} --sentences {found['data']['sentences']}"
    record = {
        "table": cell.table.name,
        "dataset": cell.dataset.name,
        "model": cell.model,
        "seed": cell.seed,
        "command": f"python -m fairseq_synth.inspect CHECKPOINT --data DATA/bin {flags} --out DIR",
        "data": found["data"],
        **json.loads(done.read_text()),
        **({"lengths": found["lengths"]} if args.lengths else compact(found)),
    }
    provenance.write_record(ROOT / "results" / kind / f"{name}.json", record)


def compact(found: Figures) -> Figures:
    """The figures that the page shows: half the intervals of the histograms, the corner of the patterns."""
    for attention in found["attentions"].values():
        histograms = {kind: attention["histograms"][kind] for kind in ("logits", "weights")}
        for histogram in histograms.values():
            histogram["shares"] = {
                state: [float(f"{left + right:.3g}") for left, right in zip(values[::2], values[1::2])]
                for state, values in histogram["shares"].items()
            }
        corner = [[row[:SIZE] for row in head[:SIZE]] for head in attention.pop("pattern")]
        attention["histograms"] = histograms
        attention.update({} if attention["group"] == "decoder.cross" else {"pattern": corner})
    kept = {name: found[name] for name in ("loss", "layers", "removal", "attentions")}
    return {**kept, "updates": found["checkpoint"]["updates"]}


def load(folder: str = FOLDER, table: str = TABLE) -> Dict[str, Figures]:
    """{model: its record}, of a table's first column and the first seed that is there, in the order of its rows."""
    order, dataset = TABLES[table].models(), TABLES[table].datasets[0].name
    found: Dict[str, Figures] = {}
    records = render.load(folder, f"{table}-{dataset}-*")
    for record in sorted(records, key=lambda r: (order.index(r["model"]), r["seed"])):
        groups = by_group(record.get("attentions", {}))  # layer by layer
        found.setdefault(record["model"], {**record, "groups": groups})
    return found


# ---- tables


def table() -> str:
    """The page's table: a mean over the heads of each group."""
    records = load()
    if not records:
        return "No model has been analysed yet.\n"
    heads = ["model", "updates", "attention", "entropy", "diagonal", "neighbours", "words"]
    heads += ["most, least important head", "BLEU", "half removed", "all removed"]
    rows = []
    for model, record in records.items():
        for group, own in record["groups"].items():
            heads_of = {name: [value for attention in own for value in attention[name]] for name in MEANS}
            important = [value for attention in own for value in attention["gradient"]]
            curve = record["removal"]["groups"][group]
            bleu = (curve["bleu"][0], curve["bleu"][curve["share"].index(0.5)], curve["bleu"][-1])
            figures = [f"{statistics.mean(values):.2f}" for values in heads_of.values()]
            figures += [f"{max(important):.3f}, {min(important):.3f}", *(f"{value:.1f}" for value in bleu)]
            rows.append([label(model), str(record["updates"]), GROUPS[group], *figures])
    first = next(iter(records.values()))
    note = (
        f"{first['data']['sentences']} sentences of {first['dataset']} {first['data']['subset']}, greedy search, "
        f"`{first['removal']['signature']}`. `{first['command']}`, by `scripts/analyse.sh {first['table']}`. "
        f"{origin(list(records.values()))}"
    )
    return "\n".join([markdown(heads, rows), note, ""])


def lengths(name: str) -> str:
    """Loss, and BLEU, of each range of sentence lengths, for the models of a table."""
    records = load(LENGTHS, name)
    if not records:
        return "No model has been measured yet.\n"
    first, shortest = next(iter(records.values())), 1
    columns: List[Column] = []
    for longest, sentences in [(found["longest"], found["sentences"]) for found in first["lengths"]["ranges"]]:
        own = [(model, r) for model, record in records.items() for r in record["lengths"]["ranges"]]
        cells = {model: f"{r['loss']:.2f}, {r['bleu']:.1f}" for model, r in own if r["longest"] == longest}
        columns.append((f"{shortest} to {longest} ({sentences})", cells))
        shortest = longest + 1
    note = (
        f"Beam {first['lengths']['beam']}, `{first['lengths']['signature']}`. `{first['command']}`, by "
        f"`scripts/analyse.sh {name} --lengths`. {origin(list(records.values()))}"
    )
    return "\n".join([of_models(columns, records), note, ""])


def readme() -> str:
    """The picture of learned R, once there is one."""
    record = load().get("random")
    if record is None:
        return ""
    text = f"The encoder's softmax(R) of every layer and head after {record['updates']} updates, first {SIZE} positions"
    return f"\n![{text}](docs/learned-r.png)\n\n"


# ---- pictures


def pictures() -> Iterator[Picture]:
    """Those of docs/analysis.md, and learned R for the README."""
    records = load()
    if not records:
        return
    yield histograms(records, "logits", "logit")
    yield histograms(records, "weights", "attention weight (share of weights, log scale)")
    yield patterns(records)
    yield heads_by_layer(records)
    first = next(iter(records.values()))
    of_values = ("share of the singular values", "share of their sum")
    yield by_choice("singular-values", records, GROUPS, singular_values, *of_values)
    branches = {name: name for name in first["layers"]["trained"]["encoder"]}
    yield by_choice("rank", records, branches, rank, "encoder layer", "distance from equal rows", yscale="log")
    removed = {group: GROUPS[group] for group in first["removal"]["groups"]}
    yield by_choice("removal", records, removed, removal, "share of heads removed", "BLEU")
    if "random" in records:  # softmax(R) of the encoder's heads, a block for each layer
        layers = [patterns_of(own, f"layer {own['layer']}") for own in records["random"]["groups"]["encoder.self"]]
        panels = [panel for layer in layers for panel in layer]
        yield Picture("learned-r.png", panels, (0.8 * len(panels), 1.15), len(panels))


def histograms(records: Dict[str, Figures], kind: str, below: str) -> Picture:
    """A row for each model, a column for the first and the last layer of a stack; the initial state is gray."""
    panels: List[Panel] = []
    for model, record in records.items():
        for group in ("encoder.self", "decoder.self"):
            for attention in (record["groups"][group][0], record["groups"][group][-1]):
                calls = [*stairs(attention["histograms"][kind]), *([] if panels else [legend()])]
                title = {"title": f"{group.split('.')[0]}, layer {attention['layer']}"} if len(panels) < 4 else {}
                side = {} if len(panels) % 4 else {"ylabel": model}
                scale = {"yscale": "log"} if kind == "weights" else {}
                calls.append(("tick_params", [], {"axis": "y", "which": "both", "left": False, "labelleft": False}))
                panels.append(Panel(calls, {**title, **side, **scale}))
    return Picture(f"analysis-{kind}.png", panels, (10, 1.5 * len(records) + 0.6), 4, below=below)


def patterns_of(attention: Figures, title: str, **settings: str) -> List[Panel]:
    """A panel for each head; the first one has the title, if any, and the settings."""
    first, *others = [image(matrix, cmap="Blues", vmin=0) for matrix in attention["pattern"]]
    named = [*first, *([name_above(title)] if title else [])]
    return [Panel(named, settings), *(Panel(calls, {}) for calls in others)]


def patterns(records: Dict[str, Figures]) -> Picture:
    """For each model a block of columns, one for each head; a row for each layer of the encoder, then the decoder."""
    rows: List[List[Panel]] = []
    for group in ("encoder.self", "decoder.self"):
        for layer in range(len(next(iter(records.values()))["groups"][group])):
            row: List[Panel] = []
            for model, record in records.items():
                title = "" if layer else f"{model}, {group.split('.')[0]}"
                side = {} if row else {"ylabel": f"layer {layer}"}
                row += patterns_of(record["groups"][group][layer], title, **side)
            rows.append(row)
    panels = [panel for row in rows for panel in row]
    return Picture("analysis-patterns.png", panels, (3.1 * len(records) + 0.4, 0.85 * len(rows)), len(rows[0]))


def heads_by_layer(records: Dict[str, Figures]) -> Picture:
    """A panel for each figure, a dot for each head."""
    panels: List[Panel] = []
    for title, figures in OF_HEADS.items():
        calls: List[Call] = []
        for place, (model, record) in enumerate(records.items()):
            shift = (place - (len(records) - 1) / 2) * 0.7 / len(records)
            attentions = [attention for group in GROUPS for attention in record["groups"][group]]
            for x, attention in enumerate(attentions):
                values = [sum(parts) for parts in zip(*(attention[name] for name in figures))]
                style = {"s": 9, "color": color(model, list(records), BASELINE), "label": None if x else model}
                calls.append(("scatter", [[x + shift] * len(values), values], style))
        names = [f"{attention['group'].replace('.', ' ')} {attention['layer']}" for attention in attentions]
        calls.append(("set_xticks", [list(range(len(names))), names], {"rotation": 60, "ha": "right"}))
        panels.append(Panel([*calls, *([] if panels else [legend()])], {"title": title, "ylim": (0, None)}))
    return Picture("analysis-heads.png", panels, (11, 6.4), 2)


def by_choice(
    name: str, records: Dict[str, Figures], choices: Mapping[str, str], draw: Drawing, x: str, y: str, **settings: str
) -> Picture:
    """A panel for each choice with what `draw` makes of each model. `choices`: with their titles."""
    panels: List[Panel] = []
    for choice, title in choices.items():
        calls: List[Call] = []
        for model, record in records.items():
            calls += draw(record, choice, model, color(model, list(records), BASELINE))
        calls += [] if panels else [legend()]
        panels.append(Panel(calls, {"title": title, "xlabel": x, **settings, **({} if panels else {"ylabel": y})}))
    return Picture(f"analysis-{name}.png", panels, (10, 3.5), len(panels), share_y=True)


def singular_values(record: Figures, group: str, model: str, own: str) -> List[Call]:
    """The mean over the heads of a group, and their span."""
    columns = list(zip(*(head for attention in record["groups"][group] for head in attention["singular_values"])))
    shares = [i / (len(columns) - 1) for i in range(len(columns))]
    span = [[min(column) for column in columns], [max(column) for column in columns]]
    middle = line(shares, [round(sum(column) / len(column), 4) for column in columns], model, own)
    return [middle, ("fill_between", [shares, *span], {"color": own, "alpha": 0.15})]


def rank(record: Figures, branches: str, model: str, own: str) -> List[Call]:
    """How far the rows are from equal with these branches, layer by layer; dashed: initial."""
    calls = []
    for state, name, style in (("initial", None, "--"), ("trained", model, "-")):
        values = record["layers"][state]["encoder"][branches]["equal_rows"]
        calls.append(line(list(range(len(values))), values, name, own, linestyle=style, marker="."))
    return calls


def removal(record: Figures, group: str, model: str, own: str) -> List[Call]:
    """BLEU as more and more heads of a group are removed."""
    curve = record["removal"]["groups"][group]
    return [line(curve["share"], curve["bleu"], model, own, marker=".")]
