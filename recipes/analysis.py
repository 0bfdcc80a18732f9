"""What attention has learned in the models of a table, by `python -m fairseq_synth.inspect`: JSON, pictures, tables.

  scripts/analyse.sh TABLE [options]

Runs the inspection on the trained cells of a table that have none yet, and keeps what docs/analysis.md shows in
results/analysis/TABLE-PAIR-VARIANT-seedN.json. All pictures of each model are in OUT/analysis. With --lengths it
measures only loss and BLEU by sentence length, on the whole test set, and keeps them in results/lengths. Then
scripts/make_tables.py renders the page.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence

from fairseq_synth.inspect.drawing import Call, Panel, Picture, color, image, legend, line, name_above, stairs
from fairseq_synth.inspect.pictures import GROUPS

from . import provenance
from .command import ROOT, Parser, UserError, dry_run, integer, run, say, write
from .hyperparameters import BASELINES, RECIPES
from .tables import BASELINE, TABLES, Cell

Figures = Dict[str, Any]
Drawing = Callable[[Figures, str, str, str], List[Call]]  # record, choice, model and its color -> calls
FOLDER = "analysis"  # of results/, and of the pictures below --out
LENGTHS = "lengths"  # the same for --lengths
TABLE = "multi30k_cpu"  # that docs/analysis.md shows
SIZE = 16  # rows and columns of a pattern that are kept


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
    origin = {"commit": provenance.commit(), "versions": provenance.versions(), "hardware": provenance.hardware()}
    for cell in TABLES[args.table].cells(args.pair, args.variant, [args.seed]):
        if cell.model in BASELINES:  # no attention that the inspection knows
            continue
        checkpoint = cell.run(args.out) / RECIPES[cell.dataset.recipe].checkpoint
        if checkpoint.exists():
            measure(cell, checkpoint, args.out, args.lengths, args.sentences or 200, origin)
        else:
            say(f"{cell.name}: not trained, {checkpoint} is missing")


def measure(cell: Cell, checkpoint: Path, out: Path, lengths: bool, sentences: int, origin: Figures) -> None:
    """Inspects a cell's checkpoint, unless that is done, and writes its record.

    Args:
        lengths: only loss and BLEU by sentence length.
        sentences: of the validation set, for all else.
        origin: commit, versions and hardware of what is measured now.
    """
    name, flags = FOLDER, f"--subset valid --sentences {sentences}"
    if lengths:
        name, flags = LENGTHS, "--subset test --only lengths --no-pictures"
    folder = out / name / f"{cell.table.name}-{cell.name}"
    done = folder / "origin.json"
    if not done.exists() or done.stat().st_mtime < checkpoint.stat().st_mtime:
        if folder.exists() and not dry_run():
            shutil.rmtree(folder)  # of an inspection cut off, or of an earlier training
        python = [sys.executable, "-m", "fairseq_synth.inspect"]
        run([*python, checkpoint, "--data", cell.data(out) / "bin", *flags.split(), "--out", folder])
        if dry_run():
            return
        write(done, json.dumps(origin) + "\n")
    (found,) = json.loads((folder / "figures.json").read_text(encoding="utf-8")).values()
    if not lengths:  # of an inspection that was done before
        flags = f"--subset {found['data']['subset']} --sentences {found['data']['sentences']}"
    record = {
        "table": cell.table.name,
        "dataset": cell.dataset.name,
        "model": cell.model,
        "seed": cell.seed,
        "command": f"python -m fairseq_synth.inspect CHECKPOINT --data DATA/bin {flags} --out DIR",
        "data": found["data"],
        **json.loads(done.read_text()),
        **({"lengths": found["lengths"]} if lengths else compact(found)),
    }
    path = ROOT / "results" / name / f"{cell.table.name}-{cell.name}.json"
    write(path, json.dumps(record, indent=1) + "\n" if lengths else in_lines(record))
    print("wrote", path)


def compact(found: Figures) -> Figures:
    """The figures that the page shows: half the intervals of the histograms, the corner of the patterns."""
    kept = {name: found[name] for name in ("loss", "layers", "removal")}
    kept["updates"] = found["checkpoint"]["updates"]
    kept["attentions"] = {}
    for name, attention in found["attentions"].items():
        own = {key: value for key, value in attention.items() if key not in ("histograms", "pattern")}
        own["histograms"] = {kind: coarse(attention["histograms"][kind]) for kind in ("logits", "weights")}
        if attention["group"] != "decoder.cross":
            own["pattern"] = [[row[:SIZE] for row in head[:SIZE]] for head in attention["pattern"]]
        kept["attentions"][name] = own
    return kept


def coarse(histogram: Figures) -> Figures:
    """A histogram with half as many intervals."""
    shares = {
        state: [float(f"{left + right:.3g}") for left, right in zip(values[::2], values[1::2])]
        for state, values in histogram["shares"].items()
    }
    return {**histogram, "shares": shares}


def in_lines(record: Figures) -> str:
    """JSON with a line for each attention and for each other figure."""

    def dump(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"))

    lines = [f'"{key}":{dump(value)}' for key, value in record.items() if key != "attentions"]
    attentions = ",\n".join(f'"{name}":{dump(value)}' for name, value in record["attentions"].items())
    return "{" + ",\n".join([*lines, f'"attentions":{{\n{attentions}}}']) + "}\n"


def load(folder: str = FOLDER, table: str = TABLE) -> Dict[str, Figures]:
    """{model: its record}, of a table's first column and the first seed that is there, in the order of its rows."""
    order, dataset = TABLES[table].models(), TABLES[table].datasets[0].name
    paths = (ROOT / "results" / folder).glob(f"{table}-{dataset}-*.json")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    found: Dict[str, Figures] = {}
    for record in sorted(records, key=lambda r: (order.index(r["model"]), r["seed"])):
        found.setdefault(record["model"], record)
    return found


def of_group(record: Figures, group: str) -> List[Figures]:
    """The attentions of a group, layer by layer."""
    return [attention for attention in record["attentions"].values() if attention["group"] == group]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- tables


def table() -> str:
    """The page's table: a mean over the heads of each group."""
    from .render import label, markdown, origin

    records = load()
    if not records:
        return "No model has been analysed yet.\n"
    columns = ["entropy", "diagonal", "neighbours", "word_dependence"]
    heads = ["model", "updates", "attention", "entropy", "diagonal", "neighbours", "words"]
    heads += ["most, least important head", "BLEU", "half removed", "all removed"]
    rows = []
    for model, record in records.items():
        for group, title in GROUPS.items():
            own = of_group(record, group)
            if not own:
                continue
            means = [mean([value for attention in own for value in attention[name]]) for name in columns]
            important = [value for attention in own for value in attention["gradient"]]
            curve = record["removal"]["groups"][group]
            half = curve["bleu"][curve["share"].index(0.5)]
            figures = [f"{value:.2f}" for value in means] + [f"{max(important):.3f}, {min(important):.3f}"]
            figures += [f"{bleu:.1f}" for bleu in (curve["bleu"][0], half, curve["bleu"][-1])]
            rows.append([label(model), str(record["updates"]), title, *figures])
    first = next(iter(records.values()))
    data = first["data"]
    note = (
        f"{data['sentences']} sentences of {first['dataset']} {data['subset']}, greedy search, "
        f"`{first['removal']['signature']}`. `{first['command']}`, by `scripts/analyse.sh {first['table']}`. "
        f"{origin(list(records.values()))}"
    )
    return "\n".join([*markdown(heads, rows), "", note, ""])


def lengths(name: str) -> str:
    """Loss, and BLEU, of each range of sentence lengths, for the models of a table."""
    from .render import label, markdown, origin

    records = load(LENGTHS, name)
    if not records:
        return "No model has been measured yet.\n"
    first = next(iter(records.values()))
    heads, before = ["model"], 0
    for found in first["lengths"]["ranges"]:
        heads.append(f"{before + 1} to {found['longest']} ({found['sentences']})")
        before = found["longest"]
    rows = []
    for model, record in records.items():
        cells = {r["longest"]: f"{r['loss']:.2f}, {r['bleu']:.1f}" for r in record["lengths"]["ranges"]}
        rows.append([label(model), *(cells.get(r["longest"], "") for r in first["lengths"]["ranges"])])
    note = (
        f"Beam {first['lengths']['beam']}, `{first['lengths']['signature']}`. `{first['command']}`, by "
        f"`scripts/analyse.sh {name} --lengths`. {origin(list(records.values()))}"
    )
    return "\n".join([*markdown(heads, rows), "", note, ""])


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
    yield of_models("singular-values", records, GROUPS, singular_values, *of_values)
    branches = {name: name for name in first["layers"]["trained"]["encoder"]}
    yield of_models("rank", records, branches, rank, "encoder layer", "distance from equal rows", yscale="log")
    removed = {group: GROUPS[group] for group in first["removal"]["groups"]}
    yield of_models("removal", records, removed, removal, "share of heads removed", "BLEU")
    if "random" in records:  # softmax(R) of the encoder's heads, a block for each layer
        layers = [(a["layer"], a["pattern"]) for a in of_group(records["random"], "encoder.self")]
        panels = [
            Panel([*image(matrix, cmap="Blues", vmin=0), *([] if head else [name_above(f"layer {layer}")])], {})
            for layer, heads in layers
            for head, matrix in enumerate(heads)
        ]
        yield Picture("learned-r.png", panels, (0.8 * len(panels), 1.15), len(panels))


def histograms(records: Dict[str, Figures], kind: str, below: str) -> Picture:
    """A row for each model, a column for the first and the last layer of a stack; the initial state is gray."""
    panels: List[Panel] = []
    for model, record in records.items():
        for group in ("encoder.self", "decoder.self"):
            for attention in (of_group(record, group)[0], of_group(record, group)[-1]):
                calls = [*stairs(attention["histograms"][kind]), *([] if panels else [legend()])]
                title = {"title": f"{group.split('.')[0]}, layer {attention['layer']}"} if len(panels) < 4 else {}
                label = {} if len(panels) % 4 else {"ylabel": model}
                scale = {"yscale": "log"} if kind == "weights" else {}
                calls.append(("tick_params", [], {"axis": "y", "which": "both", "left": False, "labelleft": False}))
                panels.append(Panel(calls, {**title, **label, **scale}))
    return Picture(f"analysis-{kind}.png", panels, (10, 1.5 * len(records) + 0.6), 4, below=below)


def patterns(records: Dict[str, Figures]) -> Picture:
    """For each model a block of columns, one for each head; a row for each layer of the encoder, then the decoder."""
    groups = ("encoder.self", "decoder.self")
    rows: List[List[Panel]] = []
    for group in groups:
        for layer in range(len(of_group(next(iter(records.values())), group))):
            rows.append([])
            for model, record in records.items():
                for head, matrix in enumerate(of_group(record, group)[layer]["pattern"]):
                    title = [name_above(f"{model}, {group.split('.')[0]}")] if layer == head == 0 else []
                    side = {"ylabel": f"layer {layer}"} if len(rows[-1]) == 0 else {}
                    rows[-1].append(Panel([*image(matrix, cmap="Blues", vmin=0), *title], side))
    panels = [panel for row in rows for panel in row]
    return Picture("analysis-patterns.png", panels, (3.1 * len(records) + 0.4, 0.85 * len(rows)), len(rows[0]))


def heads_by_layer(records: Dict[str, Figures]) -> Picture:
    """A panel for each figure, a dot for each head."""
    found: Dict[str, List[Call]] = {}
    for place, (model, record) in enumerate(records.items()):
        attentions = [attention for group in GROUPS for attention in of_group(record, group)]
        shift = (place - (len(records) - 1) / 2) * 0.7 / len(records)
        names = [f"{attention['group'].replace('.', ' ')} {attention['layer']}" for attention in attentions]
        for x, attention in enumerate(attentions):
            local = [a + b for a, b in zip(attention["diagonal"], attention["neighbours"])]
            for title, values in (
                ("entropy (nats)", attention["entropy"]),
                ("weight on the token and its neighbours", local),
                ("dependence on words", attention["word_dependence"]),
                ("importance by gradient (nats a token)", attention["gradient"]),
            ):
                style = {"s": 9, "color": color(model, list(records), BASELINE), "label": None if x else model}
                found.setdefault(title, []).append(("scatter", [[x + shift] * len(values), values], style))
    ticks: Call = ("set_xticks", [list(range(len(names))), names], {"rotation": 60, "ha": "right"})
    panels = [Panel([*calls, ticks], {"title": title, "ylim": (0, None)}) for title, calls in found.items()]
    panels[0].calls.append(legend())  # type: ignore[attr-defined]
    return Picture("analysis-heads.png", panels, (11, 6.4), 2)


def of_models(
    name: str, records: Dict[str, Figures], choices: Mapping[str, str], draw: Drawing, x: str, y: str, **settings: str
) -> Picture:
    """A panel for each choice with what `draw` makes of each model. `choices`: with their titles."""
    panels: List[Panel] = []
    for choice, title in choices.items():
        calls = [
            call
            for model, record in records.items()
            for call in draw(record, choice, model, color(model, list(records), BASELINE))
        ]
        calls += [] if panels else [legend()]
        panels.append(Panel(calls, {"title": title, "xlabel": x, **settings, **({} if panels else {"ylabel": y})}))
    return Picture(f"analysis-{name}.png", panels, (10, 3.5), len(panels), share_y=True)


def singular_values(record: Figures, group: str, model: str, own: str) -> List[Call]:
    """The mean over the heads of a group, and their span."""
    columns = list(zip(*(head for attention in of_group(record, group) for head in attention["singular_values"])))
    shares = [i / (len(columns) - 1) for i in range(len(columns))]
    span = [[min(column) for column in columns], [max(column) for column in columns]]
    middle = line(shares, [round(mean(column), 4) for column in columns], model, own)
    return [middle, ("fill_between", [shares, *span], {"color": own, "alpha": 0.15})]


def rank(record: Figures, branches: str, model: str, own: str) -> List[Call]:
    """How far the rows are from equal with these branches, layer by layer; dashed: initial."""
    calls = []
    for state, label, style in (("initial", None, "--"), ("trained", model, "-")):
        values = record["layers"][state]["encoder"][branches]["equal_rows"]
        calls.append(line(list(range(len(values))), values, label, own, linestyle=style, marker="."))
    return calls


def removal(record: Figures, group: str, model: str, own: str) -> List[Call]:
    """BLEU as more and more heads of a group are removed."""
    curve = record["removal"]["groups"][group]
    return [line(curve["share"], curve["bleu"], model, own, marker=".")]
