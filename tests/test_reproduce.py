"""The cells of a table: from text to a record, in two stages, shared, resumed and listed; the contents of a record."""

import math
import os
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers import ROOT, assert_refused, run_script, used_weights
from small_text import LABELS, small_model_flags, write, write_parallel_text

from recipes import catalog, logs, reproduce, score, steps, text, train
from recipes.catalog import RECIPES, TABLES, Column
from recipes.metrics import score_record

pytestmark = pytest.mark.usefixtures("programs_in_process")
CELL = "en-de-random_vanilla-seed1"
ROW = f"first-{CELL}"  # the folder of its run
BASE = "first-en-de-transformer-seed1"  # the folder of the baseline's run


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Replaces the catalog by four small tables, whose results are written to a folder of the test.

    - ``first`` trains models for 4 updates.
    - ``second`` begins with the weights of a run of ``first``, and trains for 2 updates on other text. Its learning
      rate is 0, so that the weights stay the same.
    - ``longer`` resumes a run of ``first``, with the state of its optimizer, until 8 updates are reached in all.
    - ``at_once`` trains for 8 updates from the start, which is the same training as ``first`` and ``longer``.
    """
    base = RECIPES["multi30k_cpu"]
    small_flags = {
        **base.flags,
        **small_model_flags("encoder", "decoder"),
        "warmup-updates": "2",
        "data-buffer-size": "0",
    }
    small_recipe = replace(
        base,
        flags=small_flags,
        max_update=4,
        save_every=2,
        average=2,
        beam=1,
        generation={"max-len-b": 4},
    )
    small_table = replace(
        TABLES["multi30k_cpu"],
        seeds=(1,),
        preparation={"merges": 90, "subwords": "sentencepiece"},
        rows=["transformer", "random_vanilla"],
    )
    without_learning = {**small_flags, "lr": "0"}
    recipes = [
        replace(small_recipe, name="first"),
        # It has a single checkpoint, so that there is nothing to average.
        replace(small_recipe, name="second", init="first", flags=without_learning, max_update=2, average=0),
        replace(small_recipe, name="longer", init="first", resume=True, max_update=8),
        replace(small_recipe, name="at_once", max_update=8),
    ]
    own_data = "first-{dataset}"  # the folder of data that first, longer and at_once share
    data_named_after_table = ""
    small_tables = [
        replace(small_table, name="first", corpus="own", data=own_data),
        replace(small_table, name="second", corpus="other", data=data_named_after_table),
        replace(small_table, name="longer", corpus="own", data=own_data),
        replace(small_table, name="at_once", corpus="own", data=own_data),
    ]
    for recipe in recipes:
        monkeypatch.setitem(RECIPES, recipe.name, recipe)
    for table in small_tables:
        column = Column("en-de", "En-De", recipe=table.name)
        monkeypatch.setitem(TABLES, table.name, replace(table, columns=[column]))
    monkeypatch.setattr(catalog, "ROOT", tmp_path)


def load_results(folder, table, device="cpu"):
    """Returns the records of a table: {name of a cell: its record}.

    Args:
        folder: the folder of the results of all tables is its subfolder results.
        table: the name of the table.
        device: "cpu" or "gpu", the subfolder with the records of this device.
    """
    records = {}
    for path in (folder / "results" / table / device).glob("*.json"):
        records[path.stem] = steps.load(path)
    return records


def load_weights(checkpoint):
    """Returns the weights in a checkpoint, without the entries that no model reads."""
    state = torch.load(checkpoint, weights_only=False)
    return used_weights(state["model"])


@pytest.mark.slow
def test_from_text_to_a_record(tables, tmp_path, capsys):
    """A table whose recipe begins with another table's run has the other table run first.

    The functions that begin with ``check_`` describe the records and the files that it leaves.
    """
    for corpus in ("own", "other"):  # each corpus is in a folder of its name
        write_parallel_text(tmp_path / "from" / corpus)
    # The second table, which uses the corpus other, has other text than the first one.
    write(tmp_path / "from" / "other" / "valid.en", ["other words"] * 12)

    def call(table, *options):
        """Runs reproduce.sh for a table, and returns what it prints."""
        reproduce.main([table, "--from", f"{tmp_path}/from", "--out", str(tmp_path), "--gpus", "0", *options])
        return capsys.readouterr().out

    # Each check needs the runs that the checks before it leave.
    check_two_stages(tmp_path, call)
    check_record(load_results(tmp_path, "first"))
    check_longer_training(tmp_path, call)
    check_precision_of_first_stage(tmp_path, call)
    check_scores_with_other_options(tmp_path / "runs", capsys)


def check_two_stages(folder, call):
    """Checks that the second table has the first one trained and scored, and takes its subwords and weights.

    The cell is `CELL` in both tables. Its run in the first table is the folder `ROW`: "first-" and the cell's name.
    Its run in the second table is the folder "second-" and the cell's name.

    Args:
        folder: the folder of the data, the runs and the results.
        call: calls reproduce.sh for a table, and returns what it prints.
    """
    printed = call("second", "--variant", "random_vanilla")
    assert printed.count("+ fairseq-train ") == 2  # one run of each table
    assert printed.count("SentencePiece, 90") == 1  # 90 subwords are learned for the first table, and used for both
    for name in ("pieces.model", "bin/dict.de.txt"):
        first_file = folder / "data" / "first-en-de" / name
        second_file = folder / "data" / "second-en-de" / name
        assert first_file.read_bytes() == second_file.read_bytes()
    # The second stage begins with the weights that were scored in the first one. As its learning rate is 0, they stay.
    first_run = folder / "runs" / ROW
    second_run = folder / "runs" / f"second-{CELL}"
    weights = load_weights(first_run / "evaluation" / "checkpoint_avg.pt")
    tuned_weights = load_weights(second_run / "checkpoint_last.pt")
    assert weights.keys() == tuned_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(tuned_weights[name], weight, atol=1e-5, rtol=1e-5)
    # The record names the run whose weights were the first ones.
    assert load_results(folder, "second")[CELL]["init"] == ROW

    # When it is called again, there is nothing left to do.
    assert "fairseq" not in call("second", "--variant", "random_vanilla")

    # The first table has two models. Only its baseline is missing.
    printed = call("first")
    assert printed.count("+ fairseq-train ") == 1
    assert f"{CELL}: is scored already" in printed


def check_record(records):
    """Checks that a record has the command, the curve, the weights alpha of each head, and the comparison.

    The comparison is with the baseline, whose record has none. `records` are those of the first table.
    """
    record = records[CELL]
    assert record["updates"] == record["curve"]["updates"][-1] == 4
    assert record["parameters"] > 7000
    assert record["command"] == "scripts/reproduce.sh first --dataset en-de --variant random_vanilla --seed 1 --rerun"
    assert record["hardware"].endswith("1 thread(s)")
    assert record["commit"]
    assert "precision" not in record
    assert 0 < record["significance"]["p_value"] <= 1
    assert list(record["alpha"]) == ["encoder.layers.0", "decoder.layers.0"]
    for weights_by_function in record["alpha"].values():
        assert list(weights_by_function) == ["random", "vanilla"]
        random_weights, vanilla_weights = weights_by_function.values()
        assert len(random_weights) == len(vanilla_weights) == 2  # one for each head
        for random_weight, vanilla_weight in zip(random_weights, vanilla_weights):
            assert random_weight + vanilla_weight == pytest.approx(1, abs=2e-4)
    baseline = records["en-de-transformer-seed1"]
    assert "alpha" not in baseline
    assert "significance" not in baseline


def check_longer_training(folder, call):
    """Checks that a longer training continues the run as if both had been one training, and leaves the run as it is.

    The table ``longer`` continues the run `ROW` of the table ``first`` from 4 to 8 updates. The table ``at_once``
    trains the same model for 8 updates without a stop. Both get the same weights, losses and scores.

    Args:
        folder: the folder of the data, the runs and the results.
        call: calls reproduce.sh for a table, and returns what it prints.
    """
    first_run = folder / "runs" / ROW
    files = [first_run / "checkpoint_last.pt", first_run / "train.log", first_run / "evaluation" / "scores.json"]
    contents = [path.read_bytes() for path in files]
    for table in ("longer", "at_once"):
        call(table, "--variant", "random_vanilla")
    assert [path.read_bytes() for path in files] == contents

    weights = load_weights(folder / "runs" / f"longer-{CELL}" / "checkpoint_last.pt")
    weights_at_once = load_weights(folder / "runs" / f"at_once-{CELL}" / "checkpoint_last.pt")
    for name, weight in weights.items():
        assert torch.equal(weight, weights_at_once[name]), name
    record = load_results(folder, "longer")[CELL]
    record_at_once = load_results(folder, "at_once")[CELL]
    assert record["curve"] == record_at_once["curve"]
    assert record["curve"]["updates"] == [2, 4, 6, 8]
    assert record["updates"] == 8
    assert record["figures"] == record_at_once["figures"]
    assert record["init"] == ROW  # the run that it has continued


def check_precision_of_first_stage(folder, call):
    """Checks that a run cannot be continued in another precision.

    Args:
        folder: the folder of the data, the runs and the results.
        call: calls reproduce.sh for a table, and returns what it prints.
    """
    # Without its run, the table `longer` begins again with the run of the table `first`.
    shutil.rmtree(folder / "runs" / f"longer-{CELL}")

    def train_in_other_precision(_argv):
        """Calls reproduce.sh with another precision than that of the run with which the table begins."""
        call("longer", "--variant", "random_vanilla", "--rerun", "--precision", "bf16")

    assert_refused(train_in_other_precision, part="precision is fp32, asked for bf16")


def check_scores_with_other_options(runs, capsys):
    """Checks that a run can be scored by hand, with other options than its recipe's.

    Args:
        runs: the folder of the runs.
        capsys: pytest's fixture.
    """
    run = runs / ROW
    capsys.readouterr()
    score.main([str(run), "--average", "0", "--beam", "2", "--baseline", str(runs / BASE)])
    printed = capsys.readouterr().out
    assert "note: the baseline was scored with other options" in printed
    assert ", p = " in printed
    assert printed.count("source:    ") == 3
    assert not (run / "evaluation" / "checkpoint_avg.pt").exists()
    too_few = "found 2 of 99 update checkpoints; train on, or average fewer; "
    assert_refused(score.main, run, "--average", "99", part=too_few)


class Cell(NamedTuple):
    """A cell of a table, on a small corpus.

    Attributes:
        table: the name of the table.
        corpus: a key of SMALL_CORPORA.
        model: the row of the table.
        updates: the number of updates.
        sides: the sides of the model, encoder or decoder or both.
        bounds: {metric: its lower bound and its upper bound, which it may not reach}.
    """

    table: str
    corpus: str
    model: str
    updates: int
    sides: list[str]
    bounds: dict[str, tuple[float, float]]


CELLS = [
    Cell("ptb_cpu", "words", "random", updates=44, sides=["decoder"], bounds={"ppl": (5, 16)}),  # there are 24 words
    Cell("agnews_cpu", "labels", "dense_vanilla", updates=40, sides=["encoder"], bounds={"accuracy": (90, 100.1)}),
    Cell(
        "denoising_cpu",
        "spans",
        "dynamicconv",
        updates=20,
        sides=["encoder", "decoder"],
        bounds={"log_ppl": (0, math.log(34))},
    ),
    Cell(
        "cnndm_cpu",
        "mails",
        "random",
        updates=10,
        sides=["encoder", "decoder"],
        bounds={"rougeL": (0, 100), "bleu4": (0, 100)},
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.table)
def test_a_cell_of_each_task(cell, prepared_corpus, tmp_path, monkeypatch):
    """The model learns, is scored on all of its test set, and is recorded with its curve.

    A cell names a table of the catalog. Here, the first column of the table gets a small model (with an encoder or a
    decoder or both, as `cell.sides` says), a few updates and a small corpus. Each metric has to be within its bounds:
    from the lower one to below the upper one.
    """
    table = TABLES[cell.table]
    column = table.columns[0]
    data = prepared_corpus(cell.corpus)

    def read_settings_of_prepared_data(*_, **__):
        """Takes the place of `reproduce.prepare`, as the data are prepared already."""
        return train.read_data_settings(data)

    shorten_recipe(RECIPES[column.recipe], cell.updates, small_model_flags(*cell.sides), monkeypatch)
    monkeypatch.setitem(TABLES, cell.table, replace(table, data=str(data)))
    monkeypatch.setattr(catalog, "ROOT", tmp_path)  # the results are written to the folder of the test
    monkeypatch.setattr(reproduce, "prepare", read_settings_of_prepared_data)
    monkeypatch.setattr(score.metrics.shutil, "which", lambda name: None)  # hides Java, which takes long to start
    reproduce.main([cell.table, "--variant", cell.model, "--seed", "1", "--out", str(tmp_path)])

    (record,) = load_results(tmp_path, cell.table).values()
    assert record["updates"] == record["curve"]["updates"][-1] == cell.updates
    assert record["curve"]["valid_loss"]
    for metric, (low, high) in cell.bounds.items():
        assert low <= record["figures"][metric] < high, record["figures"]
    assert record["signatures"].keys() == record["figures"].keys()
    run = tmp_path / "runs" / f"{cell.table}-{column.name}-{cell.model}-seed1"
    if table.task == "language_modeling":
        check_perplexity(record, run, data)
    elif table.task == "sentence_prediction":
        check_labels(record, run, data)
    elif table.task == "text_to_text":
        check_another_test_set(record, run, data, tmp_path)


def shorten_recipe(recipe, updates, sizes_of_model, monkeypatch):
    """Replaces a recipe of the catalog by one with a small model, which learns in few updates.

    Args:
        recipe: the recipe.
        updates: the number of updates.
        sizes_of_model: the flags that set the sizes of the model, with their values.
        monkeypatch: pytest's fixture.
    """
    flags = {**recipe.flags, **sizes_of_model, "warmup-updates": "5", "dropout": "0", "lr": "0.02"}
    if "tokens-per-sample" in flags:
        flags["tokens-per-sample"] = "32"
    generation = dict(recipe.generation)
    if generation:
        generation["min-len"] = 1
    short_recipe = replace(
        recipe,
        flags=flags,
        generation=generation,
        max_update=updates,
        save_every=updates // 2,
        init="",
        max_length=32,
    )
    monkeypatch.setitem(RECIPES, recipe.name, short_recipe)


def check_perplexity(record, run, data):
    """Checks that the perplexity is what fairseq-eval-lm prints, with all tokens counted."""
    tokens = score.count_words_and_lines(data / "text" / "test.txt")
    assert record["signatures"]["ppl"].endswith(f"words+lines:{tokens}|tokens:{tokens}|block:32|context:0")
    assert f"Perplexity: {record['figures']['ppl']:.2f}" in (run / "evaluation.log").read_text()
    for option, value in (("--beam", 4), ("--test", run.parent), ("--baseline", run)):
        no_effect = f"{option}: has no effect for the task language_modeling; remove it"
        assert_refused(score.main, run, option, value, part=no_effect)


def check_labels(record, run, data):
    """Checks that every predicted label is on the line of its example."""
    labels = list(text.lines(data / "text" / "test.label"))
    predicted = list(text.lines(run / "evaluation" / "test.predicted"))
    num_right = sum(label == prediction for label, prediction in zip(labels, predicted))
    assert record["figures"]["accuracy"] == 100 * num_right / 40
    assert set(predicted) == set(LABELS)


def check_another_test_set(record, run, data, folder):
    """Checks that another test set of the same text gets the same scores, and that a second one of its name is refused.

    `folder` is where the folders of the other test sets are made.
    """
    another = folder / "another"
    for side in ("source", "target"):
        write(another / f"test.{side}", text.lines(data / "text" / f"test.{side}"))
    score.main([str(run), "--test", str(another)])
    figures = steps.load(run / "tests" / "another" / "scores.json")["figures"]
    assert {metric: figure["score"] for metric, figure in figures.items()} == record["figures"]
    second = folder / "b" / "another"
    shutil.copytree(another, second)
    assert_refused(score.main, run, "--test", second, part="test is .*another, asked for .*b/another")


class Calls:
    """Calls reproduce.sh, and takes the place of its steps, which only leave the files that a record is made of.

    Attributes:
        steps: the steps of the last call, such as ``train RUN``.
        printed: what the last call has printed.
    """

    def __init__(self, folder, monkeypatch, capsys):
        self.folder = folder
        self.capsys = capsys
        self.steps = []
        self.printed = ""
        monkeypatch.setattr(reproduce, "prepare", self.prepare)
        monkeypatch.setattr(reproduce, "read_data_settings", lambda data: {})
        monkeypatch.setattr(reproduce, "train", self.train)
        monkeypatch.setattr(reproduce, "evaluate", self.evaluate)
        monkeypatch.setattr(reproduce, "learned_alpha", lambda run: {})
        monkeypatch.setattr(reproduce, "SCORERS", {"translation": lambda *_: self})

    def __call__(self, command_line):
        """Calls reproduce.sh, and returns the steps that it has called."""
        self.steps = []
        self.capsys.readouterr()
        reproduce.main([*command_line.split(), "--out", str(self.folder)])
        self.printed = self.capsys.readouterr().out
        return self.steps

    def prepare(self, *_, out, **__):
        """Takes the place of `reproduce.prepare`."""
        self.steps.append(f"prepare {out.name}")
        return {}

    def train(self, run, data, machine):
        """Takes the place of `reproduce.train`: leaves the files of a run, without checkpoints."""
        self.steps.append(f"train {run.folder.name}")
        hardware = "h" if machine.gpus else "a CPU, 1 thread(s)"
        steps.dump(run.folder / "run.json", {"starts": [{"commit": "c", "hardware": hardware}]})
        steps.write(run.folder / "train.log", LOG)

    def evaluate(self, run, settings, beam=1):
        """Takes the place of `reproduce.evaluate`: leaves the file of the scores."""
        self.steps.append(f"evaluate {run.folder.name}")
        scores = {
            "figures": {"bleu": score_record("BLEU", 30.5, "nrefs:1")},
            "options": {"average": 2, "beam": beam, "lenpen": 1, "context_window": 0},
            "commit": "later",
        }
        steps.dump(run.folder / "evaluation" / "scores.json", scores)

    def compare(self, _, baseline):
        """Takes the place of the significance test of a scorer."""
        return {"against": baseline.parent.name}


@pytest.fixture
def call(tables, tmp_path, monkeypatch, capsys):
    """Returns `Calls` for the small tables."""
    return Calls(tmp_path, monkeypatch, capsys)


PREPARE = "prepare first-en-de"
RUN_ROW = [f"train {ROW}", f"evaluate {ROW}"]
RUN_BASE = [f"train {BASE}", f"evaluate {BASE}"]


def test_a_cell_that_another_process_runs_is_skipped(call, tmp_path):
    with steps.locked(tmp_path / "runs" / f".{BASE}.lock"):
        assert call("first --gpus 1") == [PREPARE, *RUN_ROW]
    assert "en-de-transformer-seed1: skipped, as another" in call.printed
    record = load_results(tmp_path, "first", "gpu")[CELL]
    assert record["figures"] == {"bleu": 30.5}
    assert record["signatures"] == {"bleu": "BLEU|nrefs:1"}
    assert record["updates"] == 240
    assert record["commit"] == "c; later"
    assert "significance" not in record  # the baseline has no scores yet


def test_a_record_is_completed_when_its_baseline_is_scored(call, tmp_path):
    with steps.locked(tmp_path / "runs" / f".{BASE}.lock"):
        call("first --gpus 1")
    run_file = tmp_path / "runs" / ROW / "run.json"
    starts = steps.load(run_file)["starts"]
    steps.dump(run_file, {"starts": [{"commit": "b", "hardware": "g"}, *starts]})  # begun on another machine
    assert call("first --gpus 1") == [PREPARE, *RUN_BASE]
    records = load_results(tmp_path, "first", "gpu")
    assert records[CELL]["significance"] == {"against": BASE}
    assert records[CELL]["hardware"] == "g; h"
    assert records[CELL]["commit"] == "b; c; later"


def test_a_record_without_its_comparison_is_written_again(call, tmp_path):
    """A record is incomplete if another process has scored the baseline while the record was written."""
    call("first --gpus 1")
    records = load_results(tmp_path, "first", "gpu")
    incomplete_record = dict(records[CELL])
    del incomplete_record["significance"]
    steps.dump(tmp_path / "results" / "first" / "gpu" / f"{CELL}.json", incomplete_record)
    assert call("first") == []
    assert f"{CELL}: has a result in results/first; use --rerun to train" in call.printed
    assert load_results(tmp_path, "first", "gpu") == records
    assert call("first --gpus 1") == []


def test_options_choose_what_is_done_again(call, tmp_path):
    call("first --gpus 1")
    assert call("first --gpus 1") == []
    assert call("first --prepare") == [PREPARE]
    assert call("first --rerun --gpus 1") == [PREPARE, *RUN_BASE, *RUN_ROW]


def test_a_rerun_on_a_cpu_replaces_the_run_and_keeps_the_record_of_the_gpu(call, tmp_path):
    call("first --gpus 1")
    records = load_results(tmp_path, "first", "gpu")
    checkpoint = tmp_path / "runs" / ROW / "checkpoint_last.pt"
    checkpoint.touch()  # a file of the old run, which the new run does not write, as its training is a stand-in
    assert call("first --variant random_vanilla --rerun --gpus 0") == [PREPARE, *RUN_ROW]
    assert not checkpoint.exists()
    assert load_results(tmp_path, "first", "gpu") == records
    assert list(load_results(tmp_path, "first", "cpu")) == [CELL]


def test_a_list_has_a_command_for_each_cell_that_is_missing_or_done_again(call, tmp_path):
    """The table has two cells, one for each model. With --list, their commands are printed, and nothing is run."""
    call("first --gpus 1")
    call("first --variant random_vanilla --rerun --gpus 0")

    # On the CPU, there is no record of the Transformer yet.
    missing_cell = "scripts/reproduce.sh first --dataset en-de --variant transformer --seed 1"
    call("first --gpus 0 --list")
    assert call.printed == f"{missing_cell} --out {tmp_path} --gpus 0\n"

    # With --rerun, both cells are done again, whether they have a record or not.
    call("first --list --rerun")
    assert call.printed.count(" --rerun\n") == 2


def test_a_dry_run_of_a_rerun_removes_no_run(call, tmp_path, monkeypatch):
    call("first --gpus 1")
    checkpoint = tmp_path / "runs" / ROW / "checkpoint_last.pt"
    checkpoint.touch()
    monkeypatch.setenv("DRY_RUN", "1")
    assert call("first --rerun --gpus 1") == [PREPARE, *RUN_BASE, *RUN_ROW]
    assert checkpoint.exists()


def test_a_run_that_was_scored_with_another_beam_is_scored_again_for_a_cell_that_needs_it(call, tmp_path):
    call("first --gpus 0")
    records = load_results(tmp_path, "first")
    for name in (ROW, BASE):
        run = SimpleNamespace(folder=tmp_path / "runs" / name)
        call.evaluate(run, settings=None, beam=9)
    os.utime(tmp_path / "results" / "first" / "cpu" / f"{CELL}.json", (1, 1))  # older than the scores
    assert call("first --gpus 0") == []
    assert load_results(tmp_path, "first") == records
    second_run = [f"train second-{CELL}", f"evaluate second-{CELL}"]
    assert call("second --variant random_vanilla --gpus 0") == [PREPARE, "prepare second-en-de", *RUN_ROW, *second_run]


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


def test_the_log_of_a_training_is_read():
    """The updates of a run that was resumed are counted once. The minutes leave out what slowed it down for a while."""
    assert logs.read_log(LOG) == {
        "parameters": 1850624,
        "updates": 240,
        "target_tokens_updates_x_wpb": 240 * 850,
        "minutes": 2.0,
        "curve": {"updates": [200, 240], "valid_loss": [7.806, 6.342], "valid_ppl": [136.82, 42.04]},
    }


def test_the_quickstart_shows_four_commands_on_its_own_data_and_run():
    process = run_script("quickstart.sh", "dense", env={"DRY_RUN": "1"})
    scripts = re.findall(r"scripts/(\w+)\.sh", process.stdout)
    assert scripts == ["prepare", "train", "evaluate", "translate"], process.stderr
    commands = [line.split() for line in process.stdout.splitlines() if "scripts/" in line]
    prepare_command, train_command, evaluate_command, translate_command = commands
    assert "data/numbers" in prepare_command
    assert train_command[2:4] == ["data/numbers", "dense"]
    assert evaluate_command[-1] == "runs/numbers-dense-seed1"
    assert translate_command[-1] == "runs/numbers-dense-seed1"


class Job(NamedTuple):
    """A job of a cluster."""

    output: str  # the file that it makes
    inputs: list  # the outputs of the jobs that it waits for


NEWS_DATA = "data/news-en-de/bin/done"
NEWS_SCORES = "runs/news_cpu-en-de-random-seed1/evaluation/scores.json"
DATA_FROM_NEWS = "data/multi30k_from_news_cpu-en-de/bin/done"
MULTI30K_DATA = "data/multi30k_cpu-en-fr/bin/done"
MULTI30K_SCORES = "runs/multi30k_cpu-en-fr-random-seed77/evaluation/scores.json"

# {cells: their jobs}
JOBS = {
    "multi30k_from_news_cpu --seed 1 --variant random": [
        Job(NEWS_DATA, inputs=[]),
        Job(NEWS_SCORES, inputs=[NEWS_DATA]),
        Job(DATA_FROM_NEWS, inputs=[NEWS_DATA]),
        Job("results/multi30k_from_news_cpu/cpu/en-de-random-seed1.json", inputs=[DATA_FROM_NEWS, NEWS_SCORES]),
    ],
    # This table continues the training of another table with the same data.
    "multi30k_14k --seed 77 --dataset en-fr --variant random": [
        Job(MULTI30K_DATA, inputs=[]),
        Job(MULTI30K_SCORES, inputs=[MULTI30K_DATA]),
        Job("results/multi30k_14k/cpu/en-fr-random-seed77.json", inputs=[MULTI30K_DATA, MULTI30K_SCORES]),
    ],
}
# The options with which a job calls reproduce.sh, by the folder of the file that the job makes.
OPTIONS = {"data": " --prepare", "runs": " --rerun", "results": ""}


def run_snakemake(folder, cells):
    """Returns what snakemake prints about the jobs for some cells, in a dry run, with paths relative to `folder`.

    Args:
        folder: the folder of the data, the runs and the results.
        cells: the arguments of reproduce.sh that choose the cells.
    """
    pytest.importorskip("snakemake", reason="pip install -c constraints.txt -e '.[cluster]'")
    words = f"-m snakemake -n -p --cores 2 -s {ROOT}/recipes/cluster.smk --directory {folder} --config".split()
    process = run_script(sys.executable, *words, f"cells={cells} --gpus 0 --out {folder}")
    printed = process.stdout + process.stderr
    return printed.replace(f"{folder}/", "").replace(f"{ROOT}/", "")


# A job in the output of snakemake, of which @ stands for what differs between jobs:
#
#     rule @:
#         input: INPUTS                  (this line is missing if there are none)
#         output: OUTPUT
#         @                              (several lines)
#     Shell command: (@ --gpus 0OPTIONS) > @
PRINTED_JOB = re.compile(
    r"""
    rule\ .*:\n
    (?:\ {4}input:\ (?P<inputs>.*)\n)?
    \ {4}output:\ (?P<output>.*)\n
    (?:\ {4}.*\n)*
    Shell.*--gpus\ 0(?P<options>.*)\)\ >
    """,
    re.VERBOSE,
)


@pytest.mark.parametrize("cells", JOBS)
def test_jobs_of_a_cluster(cells, tmp_path):
    """Data, the runs that others begin with, and cells are made once each, from what they need."""
    printed = run_snakemake(tmp_path, cells)
    printed_jobs = []
    for match in PRINTED_JOB.finditer(printed):
        inputs = match["inputs"] or ""
        printed_jobs.append((inputs, match["output"], match["options"]))
    expected_jobs = []
    for job in JOBS[cells]:
        inputs = ", ".join(job.inputs)
        first_folder = job.output.split("/")[0]
        expected_jobs.append((inputs, job.output, OPTIONS[first_folder]))
    assert sorted(printed_jobs) == sorted(expected_jobs), printed


@pytest.mark.parametrize("cells", JOBS)
def test_a_cluster_has_no_job_for_a_file_that_exists(cells, tmp_path):
    first_output = JOBS[cells][0].output
    existing_file = tmp_path / first_output
    existing_file.parent.mkdir(parents=True)
    existing_file.touch()
    assert f"output: {first_output}" not in run_snakemake(tmp_path, cells)


def test_a_wrong_table_is_named_before_the_jobs_of_a_cluster(tmp_path):
    printed = run_snakemake(tmp_path, "tabel2 --seed 1")
    assert "choose from 'table2'" in printed
    assert "not a call of reproduce.sh" in printed
