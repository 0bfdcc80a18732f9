"""The cells of a table: from text to a record, in two stages, shared, resumed and listed; what a record says."""

import math
import os
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, assert_refused, run_script, used_weights
from small_text import LABELS, parallel, sizes, write

from recipes import catalog, logs, reproduce, score, steps, text, train
from recipes.catalog import RECIPES, TABLES, Column
from recipes.metrics import score_record

pytestmark = pytest.mark.usefixtures("programs_in_process")
CELL, ROW, BASE = "en-de-random_vanilla-seed1", "first-en-de-random_vanilla-seed1", "first-en-de-transformer-seed1"


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A table of two rows, and others that begin with it; results/ is in a folder of the test."""
    base = RECIPES["multi30k_cpu"]
    flags = {**base.flags, **sizes("encoder", "decoder"), "warmup-updates": "2", "data-buffer-size": "0"}
    values = {"max_update": 4, "save_every": 2, "average": 2, "beam": 1, "generation": {"max-len-b": 4}}
    more = {"preparation": {"merges": 90, "subwords": "sentencepiece"}, "rows": ["transformer", "random_vanilla"]}
    for name, changes, corpus in (
        ("first", {}, "own"),
        ("second", {"init": "first", "flags": {**flags, "lr": "0"}, "max_update": 2, "average": 0}, "other"),
        ("longer", {"init": "first", "resume": True, "max_update": 8}, "own"),
        ("at_once", {"max_update": 8}, "own"),
    ):
        recipe = replace(base, name=name, **{**values, "flags": flags, **changes})
        monkeypatch.setitem(RECIPES, name, recipe)
        own = {"data": "first-{dataset}" if corpus == "own" else "", "columns": [Column("en-de", "En-De", name)]}
        table = replace(TABLES["multi30k_cpu"], name=name, corpus=corpus, seeds=(1,), **own, **more)
        monkeypatch.setitem(TABLES, name, table)
    monkeypatch.setattr(catalog, "ROOT", tmp_path)


def results(folder, table, device="cpu"):
    return {path.stem: steps.load(path) for path in (folder / "results" / table / device).glob("*.json")}


def weights_of(checkpoint):
    return used_weights(torch.load(checkpoint, weights_only=False)["model"])


@pytest.mark.slow
def test_from_text_to_a_record(tables, tmp_path, capsys):
    """In two stages: what begins with the first one has it run once, and takes its words and weights."""
    for name in ("own", "other"):  # each corpus in a folder of its name
        parallel(tmp_path / "from" / name)
    write(tmp_path / "from" / "other" / "valid.en", ["other words"] * 12)

    def call(table, *more):
        reproduce.main([table, "--from", f"{tmp_path}/from", "--out", str(tmp_path), "--gpus", "0", *more])
        return capsys.readouterr().out

    row, runs = ["--variant", "random_vanilla"], tmp_path / "runs"
    run, tuned = (runs / f"{name}-{CELL}" for name in ("first", "second"))
    said = call("second", *row)
    assert said.count("+ fairseq-train ") == 2 and said.count("SentencePiece, 90") == 1
    first, second = (tmp_path / "data" / f"{name}-en-de" for name in ("first", "second"))
    for name in ("pieces.model", "bin/dict.de.txt"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    average = run / "evaluation" / "checkpoint_avg.pt"
    before, after = weights_of(average), weights_of(tuned / "checkpoint_last.pt")
    assert before.keys() == after.keys()  # and the same, as the second stage's learning rate is 0
    assert all(torch.allclose(value, after[name], atol=1e-5) for name, value in before.items())
    assert results(tmp_path, "second")[CELL]["init"] == run.name
    assert "fairseq" not in call("second", *row)
    said = call("first")
    assert said.count("+ fairseq-train ") == 1 and f"{CELL}: is scored already" in said
    found = results(tmp_path, "first")
    one = found[CELL]
    assert one["updates"] == one["curve"]["updates"][-1] == 4 and one["parameters"] > 7000
    assert one["command"] == "scripts/reproduce.sh first --dataset en-de --variant random_vanilla --seed 1 --rerun"
    assert [*one["alpha"]] == ["encoder.layers.0", "decoder.layers.0"]
    assert not {"alpha", "significance"} & {*found["en-de-transformer-seed1"]}
    for weights in one["alpha"].values():  # of each head
        assert [*weights] == ["random", "vanilla"] and [len(heads) for heads in weights.values()] == [2, 2]
        assert all(sum(pair) == pytest.approx(1, abs=2e-4) for pair in zip(*weights.values()))
    assert one["hardware"].endswith("1 thread(s)") and one["commit"] and "precision" not in one
    assert 0 < one["significance"]["p_value"] <= 1
    # a longer training goes on from that run as if it had been one training; that run stays as it is
    longer, at_once = (runs / f"{name}-{CELL}" for name in ("longer", "at_once"))
    kept = [run / "checkpoint_last.pt", run / "train.log", run / "evaluation" / "scores.json"]
    before = [path.read_bytes() for path in kept]
    for table in ("longer", "at_once"):
        call(table, *row)
    assert [path.read_bytes() for path in kept] == before
    weights, others = (weights_of(path / kept[0].name) for path in (longer, at_once))
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    one, other = (results(tmp_path, table)[CELL] for table in ("longer", "at_once"))
    assert one["curve"] == other["curve"] and one["figures"] == other["figures"] and one["init"] == run.name
    assert one["curve"]["updates"] == [2, 4, 6, 8] and one["updates"] == 8
    shutil.rmtree(longer)
    assert_refused(
        lambda _: call("longer", *row, "--rerun", "--precision", "bf16"), part="precision is fp32, asked for bf16"
    )
    # by hand, with other options
    capsys.readouterr()
    score.main([str(run), "--average", "0", "--beam", "2", "--baseline", str(runs / BASE)])
    said = capsys.readouterr().out
    assert "note: the baseline was evaluated with other options" in said and ", p = " in said
    assert said.count("source:    ") == 3 and not average.exists()
    assert_refused(
        score.main, run, "--average", "99", part="found 2 of 99 update checkpoints; train on, or average fewer; "
    )


@pytest.mark.parametrize("name, data, model, updates, own_sizes, bounds", [
    ("ptb_cpu", "words", "random", 44, sizes("decoder"), {"ppl": (5, 16)}),  # of 24 words
    ("agnews_cpu", "labels", "dense_vanilla", 40, sizes("encoder"), {"accuracy": (90, 100.1)}),
    ("denoising_cpu", "spans", "dynamicconv", 20, sizes("encoder", "decoder"), {"log_ppl": (0, math.log(34))}),
    ("cnndm_cpu", "mails", "random", 10, sizes("encoder", "decoder"), {"rougeL": (0, 100), "bleu4": (0, 100)}),
])  # fmt: skip
def test_a_cell_of_each_task(name, data, model, updates, own_sizes, bounds, prepared_corpus, tmp_path, monkeypatch):
    """It learns, is scored on all of its test set, and is recorded with its curve."""
    table, data = TABLES[name], prepared_corpus(data)
    base = RECIPES[table.columns[0].recipe]
    flags = {**base.flags, **own_sizes, "warmup-updates": "5", "dropout": "0", "lr": "0.02"}
    flags.update({"tokens-per-sample": "32"} if "tokens-per-sample" in flags else {})
    changes = {"flags": flags, "max_update": updates, "save_every": updates // 2, "init": "", "max_length": 32}
    changes["generation"] = {**base.generation, **({"min-len": 1} if base.generation else {})}
    monkeypatch.setitem(RECIPES, base.name, replace(base, **changes))
    monkeypatch.setitem(TABLES, name, replace(table, data=str(data)))
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce, "prepare", lambda *_, **__: train.prepared(data))
    monkeypatch.setattr(score.metrics.shutil, "which", lambda name: None)  # Java takes long to start
    reproduce.main([name, "--variant", model, "--seed", "1", "--out", str(tmp_path)])
    (found,) = results(tmp_path, name).values()
    assert found["updates"] == found["curve"]["updates"][-1] == updates and found["curve"]["valid_loss"]
    assert all(low <= found["figures"][figure] < high for figure, (low, high) in bounds.items()), found["figures"]
    assert found["signatures"].keys() == found["figures"].keys()
    run = tmp_path / "runs" / f"{name}-{table.columns[0].name}-{model}-seed1"
    if table.task == "language_modeling":  # what fairseq-eval-lm prints, with all tokens counted
        tokens = score.count_words_and_lines(data / "text" / "test.txt")
        assert found["signatures"]["ppl"].endswith(f"words+lines:{tokens}|tokens:{tokens}|block:32|context:0")
        assert f"Perplexity: {found['figures']['ppl']:.2f}" in (run / "evaluation.log").read_text()
        for option, value in (("--beam", 4), ("--test", tmp_path), ("--baseline", run)):
            assert_refused(score.main, run, option, value, part=f"{option}: not for language_modeling; leave it out")
    elif table.task == "sentence_prediction":  # every label stands at the line of its example
        labels = [*text.lines(data / "text" / "test.label")]
        predicted = [*text.lines(run / "evaluation" / "test.predicted")]
        assert found["figures"]["accuracy"] == 100 * sum(map(str.__eq__, labels, predicted)) / 40
        assert {*predicted} == {*LABELS}
    elif table.task == "text_to_text":  # another test set, of the same text
        for side in ("source", "target"):
            write(tmp_path / "another" / f"test.{side}", text.lines(data / "text" / f"test.{side}"))
        score.main([str(run), "--test", str(tmp_path / "another")])
        other = steps.load(run / "tests" / "another" / "scores.json")["figures"]
        assert {name: value["score"] for name, value in other.items()} == found["figures"]
        shutil.copytree(tmp_path / "another", tmp_path / "b" / "another")  # a second folder of that name
        assert_refused(
            score.main, run, "--test", tmp_path / "b" / "another", part="test is .*another, asked for .*b/another"
        )


def test_the_cells_of_a_table(tables, tmp_path, monkeypatch, capsys):
    """What is missing is run, the baseline first. Trainings and evaluations only leave what a record is made of."""
    calls = []

    def fit(run, data, machine):
        calls.append(f"train {run.folder.name}")
        start = {"commit": "c", "hardware": "h" if machine.gpus else "a CPU, 1 thread(s)"}
        steps.dump(run.folder / "run.json", {"starts": [start]})
        steps.write(run.folder / "train.log", LOG)

    def evaluate(run, settings, beam=1):
        calls.append(f"evaluate {run.folder.name}")
        options = {"average": 2, "beam": beam, "lenpen": 1, "context_window": 0}
        scores = {"figures": {"bleu": score_record("BLEU", 30.5, "nrefs:1")}, "options": options, "commit": "later"}
        steps.dump(run.folder / "evaluation" / "scores.json", scores)

    for name, stub in {
        "prepare": lambda *_, out, **__: calls.append(f"prepare {out.name}") or {},
        "prepared": lambda data: {},
        "train": fit,
        "evaluate": evaluate,
        "learned_alpha": lambda run: {},
        "SCORERS": {"translation": lambda *_: SimpleNamespace(compare=lambda _, base: {"against": base.parent.name})},
    }.items():
        monkeypatch.setattr(reproduce, name, stub)

    def call(argv):
        calls.clear()
        reproduce.main([*argv.split(), "--out", str(tmp_path)])
        return [*calls], capsys.readouterr().out

    def done(*names):
        return [f"{step} {name}" for name in names for step in ("train", "evaluate")]

    data = "prepare first-en-de"
    with steps.locked(tmp_path / "runs" / f".{BASE}.lock"):  # another process runs it
        found, said = call("first --gpus 1")
    assert found == [data, *done(ROW)] and "en-de-transformer-seed1: skipped, as another" in said
    one = results(tmp_path, "first", "gpu")[CELL]
    assert one["figures"] == {"bleu": 30.5} and one["signatures"] == {"bleu": "BLEU|nrefs:1"} and one["updates"] == 240
    assert one["commit"] == "c; later" and "significance" not in one
    begun = tmp_path / "runs" / ROW / "run.json"  # on another machine
    steps.dump(begun, {"starts": [{"commit": "b", "hardware": "g"}, *steps.load(begun)["starts"]]})
    assert call("first --gpus 1")[0] == [data, *done(BASE)]  # with which the other row is compared now
    kept = results(tmp_path, "first", "gpu")
    assert kept[CELL]["significance"] == {"against": BASE}
    assert kept[CELL]["hardware"] == "g; h" and kept[CELL]["commit"] == "b; c; later"
    record = tmp_path / "results" / "first" / "gpu" / f"{CELL}.json"  # the baseline came while it was written
    steps.dump(record, {name: value for name, value in kept[CELL].items() if name != "significance"})
    found, said = call("first")
    assert results(tmp_path, "first", "gpu") == kept
    assert found == call("first --gpus 1")[0] == [] and f"{CELL}: is in results/first; --rerun trains" in said
    assert call("first --prepare")[0] == [data] and call("first --rerun --gpus 1")[0] == [data, *done(BASE, ROW)]
    kept = results(tmp_path, "first", "gpu")
    (tmp_path / "runs" / ROW / "checkpoint_last.pt").touch()
    assert call("first --variant random_vanilla --rerun --gpus 0")[0] == [data, *done(ROW)]
    assert not (tmp_path / "runs" / ROW / "checkpoint_last.pt").exists()
    assert results(tmp_path, "first", "gpu") == kept and [*results(tmp_path, "first")] == [CELL]
    said = f"scripts/reproduce.sh first --dataset en-de --variant transformer --seed 1 --out {tmp_path} --gpus 0\n"
    assert call("first --gpus 0 --list")[1] == said
    assert call("first --list --rerun")[1].count(" --rerun\n") == 2
    # scored by hand with another beam: records stay, and a cell that needs it has it scored anew by its recipe
    kept = results(tmp_path, "first")
    for name in (ROW, BASE):
        evaluate(SimpleNamespace(folder=tmp_path / "runs" / name), None, beam=9)
    os.utime(tmp_path / "results" / "first" / "cpu" / f"{CELL}.json", (1, 1))
    assert call("first")[0] == [] and results(tmp_path, "first") == kept
    assert call("second --variant random_vanilla")[0] == [data, "prepare second-en-de", *done(ROW, f"second-{CELL}")]


LOG = """\
2026 | INFO | fairseq_cli.train | num. shared model params: 1,850,624 (num. trained: 1,850,624)
2026 | INFO | fairseq_cli.train | num. expert model params: 0 (num. trained: 0)
2026 | INFO | train_inner | epoch 001: 100 / 546 loss=11.1, ups=2, wpb=900, num_updates=100, train_wall=33, wall=36
2026 | INFO | train_inner | epoch 001: 200 / 546 loss=8.9, ups=0.1, wpb=800, num_updates=200, train_wall=32, wall=69
2026 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 7.806 | nll_loss 7.096 | ppl 136.82 | num_updates 200
2026 | INFO | train_inner | epoch 001: 200 / 546 loss=8.9, ups=2, wpb=800, num_updates=200, train_wall=32, wall=69
2026 | INFO | train_inner | epoch 002: 240 / 546 loss=8.9, ups=0.1, wpb=850, num_updates=240, train_wall=32, wall=99
2026 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 6.342 | ppl 42.04 | num_updates 240 | best_loss 6.3
"""


def test_a_log():
    """A run that was resumed counts its updates once. The minutes are without what slowed it down for a while."""
    curve = {"updates": [200, 240], "valid_loss": [7.806, 6.342], "valid_ppl": [136.82, 42.04]}
    found = {"parameters": 1850624, "updates": 240, "target_tokens_updates_x_wpb": 240 * 850, "minutes": 2.0}
    assert logs.read_log(LOG) == {**found, "curve": curve}


def test_the_quickstart():
    """It shows the four commands, on its own data and run."""
    done = run_script("quickstart.sh", "dense", env={"DRY_RUN": "1"})
    shown = [line.split() for line in done.stdout.splitlines() if "scripts/" in line]
    assert re.findall(r"scripts/(\w+)\.sh", done.stdout) == ["prepare", "train", "evaluate", "translate"], done.stderr
    assert "data/numbers" in shown[0] and shown[1][2:4] == ["data/numbers", "dense"]
    assert shown[2][-1] == shown[3][-1] == "runs/numbers-dense-seed1"


# {cells: {each of their jobs, by what it makes: the numbers of those that it waits for}}
JOBS = {
    "multi30k_from_news_cpu --seed 1 --variant random": {
        "data/news-en-de/bin/done": [],
        "runs/news_cpu-en-de-random-seed1/evaluation/scores.json": [0],
        "data/multi30k_from_news_cpu-en-de/bin/done": [0],
        "results/multi30k_from_news_cpu/cpu/en-de-random-seed1.json": [2, 1],
    },
    "multi30k_14k --seed 77 --dataset en-fr --variant random": {  # which goes on with the same data
        "data/multi30k_cpu-en-fr/bin/done": [],
        "runs/multi30k_cpu-en-fr-random-seed77/evaluation/scores.json": [0],
        "results/multi30k_14k/cpu/en-fr-random-seed77.json": [0, 1],
    },
}
OPTIONS = {"data": " --prepare", "runs": " --rerun", "results": ""}


def run_snakemake(folder, cells):
    pytest.importorskip("snakemake", reason="pip install -c constraints.txt -e '.[cluster]'")
    argv = f"-m snakemake -n -p --cores 2 -s {ROOT}/recipes/cluster.smk --directory {folder} --config".split()
    done = run_script(sys.executable, *argv, f"cells={cells} --gpus 0 --out {folder}")
    return (done.stdout + done.stderr).replace(f"{folder}/", "").replace(f"{ROOT}/", "")


@pytest.mark.parametrize("cells", JOBS)
def test_jobs_of_a_cluster(cells, tmp_path):
    """Data, what others begin with, and cells, each once; what there is is left out."""
    said, made = run_snakemake(tmp_path, cells), [*JOBS[cells]]
    jobs = re.findall(r"rule .*:\n(?:    input: (.*)\n)?    output: (.*)\n(?:    .*\n)*Shell.*--gpus 0(.*)\) >", said)
    wanted = [(", ".join(made[i] for i in of), name, OPTIONS[name.split("/")[0]]) for name, of in JOBS[cells].items()]
    assert sorted(jobs) == sorted(wanted), said
    (tmp_path / made[0]).parent.mkdir(parents=True)
    (tmp_path / made[0]).touch()
    assert f"output: {made[0]}" not in run_snakemake(tmp_path, cells)


def test_a_slip_is_told_to_a_cluster(tmp_path):
    said = run_snakemake(tmp_path, "tabel2 --seed 1")
    assert "choose from 'table2'" in said and "not a call of reproduce.sh" in said
