"""What attention has learned in the models of a table, by `python -m fairseq_synth.inspect`: JSON, pictures, tables.

  scripts/analyse.sh TABLE [options]

Runs the inspection on the trained cells of a table that have none yet, and keeps what docs/analysis.md shows in
results/analysis/TABLE-DATASET-VARIANT-seedN.json. All pictures of each model are in OUT/analysis. With --lengths it
measures only loss and BLEU by sentence length, on the whole test set, and keeps them in results/lengths. Then
scripts/make_tables.py renders the page.
"""

import json
import shutil
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

from fairseq_synth.inspect import comparison
from fairseq_synth.inspect.drawing import Picture
from fairseq_synth.inspect.pictures import GROUPS, by_group

from . import provenance, render
from .command import ROOT, Parser, UserError, dry_run, integer, run, say, write
from .hyperparameters import BASELINES, RECIPES
from .render import Column, label, markdown, of_models, origin
from .tables import BASELINE, TABLES, Cell

Figures = Dict[str, Any]
FOLDER = "analysis"  # of results/, and of the pictures below --out
LENGTHS = "lengths"  # the same for --lengths
TABLE = "multi30k_cpu"  # that docs/analysis.md shows
SIZE = 16  # rows and columns of a pattern that are kept
MEANS = ("entropy", "diagonal", "neighbours", "word_dependence")


def main(argv: Sequence[str]) -> None:
    parser = Parser("analyse", __doc__)
    add = parser.add_argument
    add("table", metavar="TABLE", choices=TABLES)
    add("--dataset", "--pair", type=str.split, metavar="NAMES", help="columns of the table (default: all)")
    add("--variant", type=str.split, metavar="NAMES", help="(default: all)")
    add("--seed", type=integer(0), default=1, metavar="N", help="(default: 1)")
    add("--sentences", type=integer(1), metavar="N", help="of the validation set (default: 200)")
    add("--lengths", action="store_true", help="only loss and BLEU by sentence length, on the whole test set")
    add("--out", type=Path, default=ROOT, metavar="DIR", help="data and runs (default: the project's folder)")
    args = parser.parse_args(argv)
    if args.lengths and args.sentences:
        raise UserError("--lengths takes the whole test set; leave --sentences out")
    TABLES[args.table].check(args.dataset, args.variant)
    for cell in TABLES[args.table].cells(args.dataset, args.variant, [args.seed]):
        if cell.model in BASELINES and cell.model != "transformer_plus":
            say(f"{cell.name}: left out, as it has no attention that the inspection knows")
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
    done, asked = folder / "origin.json", folder / "flags"
    is_other = asked.exists() and asked.read_text() != flags
    if not done.exists() or is_other or done.stat().st_mtime < checkpoint.stat().st_mtime:
        if folder.exists() and not dry_run():
            shutil.rmtree(folder)  # of an inspection cut off, or of an earlier training
        python = [sys.executable, "-m", "fairseq_synth.inspect"]
        run([*python, checkpoint, "--data", cell.data(args.out) / "bin", *flags.split(), "--out", folder])
        if not dry_run():
            write(asked, flags)
            write(done, json.dumps(provenance.here()) + "\n")
    if dry_run():
        return
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
    records = [record for record in records if record["model"] in order]
    for record in sorted(records, key=lambda r: (order.index(r["model"]), r["seed"])):
        found.setdefault(record["model"], record)
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
        for group, own in by_group(record["attentions"]).items():
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
    for picture in comparison.pictures(records, BASELINE):
        yield picture._replace(name=f"analysis-{picture.name}.png")
    if "random" in records:  # softmax(R) of the encoder's heads, a block for each layer
        layers = by_group(records["random"]["attentions"])["encoder.self"]
        panels = [panel for own in layers for panel in comparison.row_of_heads(own, f"layer {own['layer']}")]
        yield Picture("learned-r.png", panels, (0.8 * len(panels), 1.15), len(panels))
