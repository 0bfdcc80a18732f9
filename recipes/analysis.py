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
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from . import provenance
from .command import ROOT, Parser, UserError, dry_run, integer, run, say, write
from .hyperparameters import BASELINES, RECIPES
from .tables import BASELINE, TABLES, Cell

Figures = Dict[str, Any]
FOLDER = "analysis"  # of results/, and of the pictures below --out
LENGTHS = "lengths"  # the same for --lengths
TABLE = "multi30k_cpu"  # that docs/analysis.md shows
SIZE = 16  # rows and columns of a pattern that are kept
GROUPS = {
    "encoder.self": "encoder self-attention",
    "decoder.self": "decoder self-attention",
    "decoder.cross": "cross-attention",
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
    origin = {
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(),
    }
    for cell in TABLES[args.table].cells(args.pair, args.variant, [args.seed]):
        if cell.model in BASELINES:  # no attention that the inspection knows
            continue
        checkpoint = cell.run(args.out) / RECIPES[cell.dataset.recipe].checkpoint
        if checkpoint.exists():
            if args.lengths:
                measure_lengths(cell, checkpoint, args.out, origin)
            else:
                analyse(cell, checkpoint, args.out, args.sentences or 200, origin)
        else:
            say(f"{cell.name}: not trained, {checkpoint} is missing")


def analyse(cell: Cell, checkpoint: Path, out: Path, sentences: int, origin: Figures) -> None:
    """Inspects a cell's checkpoint, unless that is done, and writes its record.

    Args:
        origin: commit, versions and hardware.

    Raises:
        UserError: the inspection failed.
    """
    found, origin = inspect(cell, checkpoint, out, FOLDER, ["--subset", "valid", "--sentences", sentences], origin)
    if found:
        words = f"--subset {found['data']['subset']} --sentences {found['data']['sentences']}"
        keep(cell, FOLDER, in_lines({**header(cell, words, found), **origin, **compact(found)}))


def measure_lengths(cell: Cell, checkpoint: Path, out: Path, origin: Figures) -> None:
    """The same for loss and BLEU by sentence length."""
    words = "--subset test --only lengths --no-pictures"
    found, origin = inspect(cell, checkpoint, out, LENGTHS, words.split(), origin)
    if found:
        record = {**header(cell, words, found), **origin, "lengths": found["lengths"]}
        keep(cell, LENGTHS, json.dumps(record, indent=1) + "\n")


def inspect(
    cell: Cell, checkpoint: Path, out: Path, name: str, flags: Sequence[Any], origin: Figures
) -> Tuple[Figures, Figures]:
    """What the inspection says of a cell's checkpoint, now or before, and its origin; nothing in a dry run.

    Args:
        name: of the folder below `out` for what it writes.
        origin: of what is measured now.
    """
    folder = out / name / f"{cell.table.name}-{cell.name}"
    done = folder / "origin.json"
    if not done.exists() or done.stat().st_mtime < checkpoint.stat().st_mtime:
        if folder.exists() and not dry_run():
            shutil.rmtree(folder)  # of an inspection cut off, or of an earlier training
        python = [sys.executable, "-m", "fairseq_synth.inspect"]
        run([*python, checkpoint, "--data", cell.data(out) / "bin", *flags, "--out", folder])
        if dry_run():
            return {}, origin
        write(done, json.dumps(origin) + "\n")
    found: Figures
    (found,) = json.loads((folder / "figures.json").read_text(encoding="utf-8")).values()
    return found, json.loads(done.read_text())


def header(cell: Cell, words: str, found: Figures) -> Figures:
    """What a record begins with. `words`: flags of the inspection."""
    return {
        "table": cell.table.name,
        "dataset": cell.dataset.name,
        "model": cell.model,
        "seed": cell.seed,
        "command": f"python -m fairseq_synth.inspect CHECKPOINT --data DATA/bin {words} --out DIR",
        "data": found["data"],
    }


def keep(cell: Cell, name: str, text: str) -> None:
    """Writes a record into a folder of results/."""
    path = ROOT / "results" / name / f"{cell.table.name}-{cell.name}.json"
    write(path, text)
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
    heads = [
        "model",
        "updates",
        "attention",
        "entropy",
        "diagonal",
        "neighbours",
        "words",
        "most, least important head",
    ]
    heads += ["BLEU", "half removed", "all removed"]
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


# ---- pictures: a name, values, and a function that draws them in a figure


def pictures() -> Iterator[Tuple[str, Figures, Any]]:
    """Those of docs/analysis.md, and learned R for the README."""
    records = load()
    if not records:
        return
    for kind in ("logits", "weights"):
        yield f"analysis-{kind}.png", histograms(records, kind), draw_histograms
    yield "analysis-patterns.png", patterns(records), draw_patterns
    yield "analysis-heads.png", heads_by_layer(records), draw_heads
    yield "analysis-singular-values.png", singular_values(records), draw_singular_values
    yield "analysis-rank.png", {m: r["layers"] for m, r in records.items()}, draw_rank
    yield "analysis-removal.png", {m: r["removal"]["groups"] for m, r in records.items()}, draw_removal
    if "random" in records:
        yield "learned-r.png", learned_r(records["random"]), draw_learned_r


def color(model: str, models: Sequence[str]) -> str:
    """Black for the Transformer."""
    return "black" if model == BASELINE else f"C{list(models).index(model) % 10}"


def histograms(records: Dict[str, Figures], kind: str) -> Figures:
    """{model: {attention: histogram}} of the first and the last layer."""
    series: Figures = {}
    for model, record in records.items():
        for group in ("encoder.self", "decoder.self"):
            own = of_group(record, group)
            for attention in (own[0], own[-1]):
                name = f"{group.split('.')[0]}, layer {attention['layer']}"
                series.setdefault(model, {})[name] = attention["histograms"][kind]
    return {"kind": kind, "models": series}


def draw_histograms(series: Figures, figure: Any) -> None:
    """A row for each model, a column for each layer; the initial state is gray."""
    models = series["models"]
    figure.set_size_inches(10, 1.5 * len(models) + 0.6)
    cells = figure.subplots(len(models), 4, squeeze=False)
    for number, (line, (model, layers)) in enumerate(zip(cells, models.items())):
        for axes, (name, found) in zip(line, layers.items()):
            for state in ("initial", "trained"):
                shares = found["shares"][state]
                width = (found["high"] - found["low"]) / len(shares)
                edges = [found["low"] + i * width for i in range(len(shares) + 1)]
                style = {"color": "0.75", "fill": True} if state == "initial" else {"color": "tab:blue"}
                axes.stairs(shares, edges, label=state, **style)
            if series["kind"] == "weights":
                axes.set_yscale("log")
            axes.tick_params(labelsize=7)
            axes.set_yticks([])
            axes.minorticks_off()
            if number == 0:
                axes.set_title(name, fontsize=9)
        line[0].set_ylabel(model, fontsize=9)
    cells[0][0].legend(fontsize=7)
    figure.supxlabel({"logits": "logit", "weights": "attention weight (share of weights, log scale)"}[series["kind"]])


def patterns(records: Dict[str, Figures]) -> Figures:
    """{model: {stack: layers of heads}}."""
    return {
        model: {group: [a["pattern"] for a in of_group(record, group)] for group in ("encoder.self", "decoder.self")}
        for model, record in records.items()
    }


def draw_patterns(series: Figures, figure: Any) -> None:
    """A column for each model, a row for each stack; in a cell a row for each layer and a column for each head."""
    figure.set_size_inches(3.1 * len(series) + 0.4, 6.6)
    cells = figure.subplots(2, len(series), squeeze=False)
    for column, (model, groups) in enumerate(series.items()):
        for axes, (group, layers) in zip(cells[:, column], groups.items()):
            axes.axis("off")
            axes.set_title(f"{model}\n{group.split('.')[0]}", fontsize=9)
            count, heads = len(layers), len(layers[0])
            for i, layer in enumerate(layers):
                for j, matrix in enumerate(layer):
                    tile = axes.inset_axes([j / heads, 1 - (i + 1) / count, 0.94 / heads, 0.94 / count])
                    tile.imshow(matrix, cmap="Blues", vmin=0, aspect="auto")
                    tile.set_xticks([])
                    tile.set_yticks([])


def heads_by_layer(records: Dict[str, Figures]) -> Figures:
    """{figure: {model: {attention: its value for each head}}}."""
    series: Figures = {}
    for model, record in records.items():
        for group in GROUPS:
            for attention in of_group(record, group):
                name = f"{group.replace('.', ' ')} {attention['layer']}"
                local = [a + b for a, b in zip(attention["diagonal"], attention["neighbours"])]
                for figure, values in (
                    ("entropy (nats)", attention["entropy"]),
                    ("weight on the token and its neighbours", local),
                    ("dependence on words", attention["word_dependence"]),
                    ("importance by gradient (nats a token)", attention["gradient"]),
                ):
                    series.setdefault(figure, {}).setdefault(model, {})[name] = values
    return series


def draw_heads(series: Figures, figure: Any) -> None:
    """A panel for each figure, a dot for each head."""
    figure.set_size_inches(11, 6.4)
    for axes, (title, models) in zip(figure.subplots(2, 2).flatten(), series.items()):
        for place, (model, layers) in enumerate(models.items()):
            shift = (place - (len(models) - 1) / 2) * 0.7 / len(models)
            for x, values in enumerate(layers.values()):
                axes.scatter([x + shift] * len(values), values, s=9, color=color(model, list(models)),
                             label=model if x == 0 else None)  # fmt: skip
            axes.set_xticks(range(len(layers)), list(layers), rotation=60, ha="right", fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.tick_params(axis="y", labelsize=7)
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=7)


def singular_values(records: Dict[str, Figures]) -> Figures:
    """{group: {model: mean, lowest and highest cumulative share over layers and heads}}."""
    series: Figures = {}
    for model, record in records.items():
        for group in GROUPS:
            curves = [head for attention in of_group(record, group) for head in attention["singular_values"]]
            columns = list(zip(*curves))
            series.setdefault(group, {})[model] = {
                "mean": [round(mean(column), 4) for column in columns],
                "low": [min(column) for column in columns],
                "high": [max(column) for column in columns],
            }
    return series


def draw_singular_values(series: Figures, figure: Any) -> None:
    """A panel for each group, a line for each model with the span of its heads."""
    figure.set_size_inches(10, 3.6)
    for axes, (group, models) in zip(figure.subplots(1, len(series), squeeze=False, sharey=True)[0], series.items()):
        for model, found in models.items():
            shares = [i / (len(found["mean"]) - 1) for i in range(len(found["mean"]))]
            axes.plot(shares, found["mean"], color=color(model, list(models)), label=model)
            axes.fill_between(shares, found["low"], found["high"], color=color(model, list(models)), alpha=0.15)
        axes.set_title(GROUPS[group], fontsize=9)
        axes.set_xlabel("share of the singular values", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.axes[0].set_ylabel("share of their sum", fontsize=8)
    figure.axes[0].legend(fontsize=7)


def draw_rank(series: Figures, figure: Any) -> None:
    """A panel for each choice of branches, a line for each model; dashed: initial."""
    figure.set_size_inches(11, 3.4)
    branches = list(next(iter(series.values()))["trained"]["encoder"])
    for axes, name in zip(figure.subplots(1, len(branches), squeeze=False, sharey=True)[0], branches):
        for model, states in series.items():
            for state, line in (("initial", "--"), ("trained", "-")):
                values = states[state]["encoder"][name]["equal_rows"]
                label = model if state == "trained" else None
                axes.plot(values, line, marker=".", color=color(model, list(series)), label=label)
        axes.set_yscale("log")
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(len(values)))
        axes.set_xlabel("encoder layer", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.axes[0].set_ylabel("distance from equal rows", fontsize=8)
    figure.axes[0].legend(fontsize=7)


def draw_removal(series: Figures, figure: Any) -> None:
    """A panel for each group, a line for each model."""
    figure.set_size_inches(10, 3.4)
    groups = list(next(iter(series.values())))
    for axes, group in zip(figure.subplots(1, len(groups), squeeze=False, sharey=True)[0], groups):
        for model, curves in series.items():
            curve = curves[group]
            axes.plot(curve["share"], curve["bleu"], marker=".", color=color(model, list(series)), label=model)
        axes.set_title(GROUPS[group], fontsize=9)
        axes.set_xlabel("share of heads removed", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.axes[0].set_ylabel("BLEU", fontsize=8)
    figure.axes[0].legend(fontsize=7)


def learned_r(record: Figures) -> Figures:
    """softmax(R) of the encoder's heads, and how many updates R had."""
    return {"updates": record["updates"], "layers": [a["pattern"] for a in of_group(record, "encoder.self")]}


def draw_learned_r(series: Figures, figure: Any) -> None:
    """A block for each layer, a picture for each head."""
    layers, side, gap, title = series["layers"], 0.72, 0.06, 0.3  # in inches
    block = len(layers[0]) * (side + gap) + 0.25
    width, height = len(layers) * block, side + title + gap
    figure.set_size_inches(width, height)
    figure.set_layout_engine("none")
    for i, layer in enumerate(layers):
        for j, matrix in enumerate(layer):
            left = i * block + 0.125 + j * (side + gap)
            axes = figure.add_axes([left / width, gap / height, side / width, side / height])
            axes.imshow(matrix, cmap="Blues", vmin=0)
            axes.set_xticks([])
            axes.set_yticks([])
        figure.text((i + 0.5) * block / width, 1 - 0.22 / height, f"layer {i}", ha="center", fontsize=10)
