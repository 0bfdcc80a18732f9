"""The catalog: every table can be run, entries hold together, and Hydra's configs are the recipes."""

import argparse
import re
import sys
from pathlib import Path

import pytest
import yaml
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from helpers import ROOT, assert_refused, run_script

from recipes import catalog, reproduce, train
from recipes.catalog import CORPORA, RECIPES, TABLES, TASKS, Run


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_can_be_run(table, dry_run, capsys, tmp_path):
    """All its commands are shown, its architectures exist, and nothing is written. Its baseline comes first."""
    reproduce.main([table.name, "--seed", "1", "--rerun", "--out", str(tmp_path), "--gpus", "0"])
    shown = capsys.readouterr().out
    archs = re.findall(r"^\+ fairseq-train .* --arch (\S+)", shown, re.M)
    cell, stages = table.cells()[0], 0
    while cell:
        cell, stages = cell.first_stage(), stages + 1
    assert len(archs) == len(table.columns) * len(table.models()) * stages and {*archs} <= {*ARCH_CONFIG_REGISTRY}
    assert table.models()[0] == table.baseline and not any(tmp_path.iterdir())
    assert {*table.variations} <= {*table.models()} and len(table.published()) <= len(table.models())


def test_tables_and_recipes_hold_together():
    """By fairseq's code: the adaptive criterion refuses torch's DDP; a classifier leaves RoBERTa's own head out."""
    for name, recipe in RECIPES.items():
        flags = recipe.flags
        # a checkpoint with a number, which an average can take, is written at multiples of save_every alone
        assert not (recipe.average and recipe.save_every) or recipe.max_update % recipe.save_every == 0, name
        assert flags.get("criterion") != "adaptive_loss" or flags["ddp-backend"] == "legacy_ddp", name
        assert flags.get("criterion") != "sentence_prediction" or "find-unused-parameters" in flags, name
        # else the rows of a batch are a multiple of 8, and depend on the number of GPUs
        assert "tokens-per-sample" not in flags or flags["required-batch-size-multiple"] == "1", name
        assert not recipe.init or recipe.init in TABLES, name
    data = {}
    for table in TABLES.values():
        for cell in table.cells():  # a folder of data is of one preparation, and its task is the recipe's
            first = cell.first_stage()
            like = first and first.run(Path()).data
            how = cell.corpus, dict(table.preparation), like if like != cell.run(Path()).data else None
            assert data.setdefault(cell.run(Path()).data, how) == how, cell.name
            task = RECIPES[cell.column.recipe].task
            assert task == train.FAIRSEQ_TASK.get(table.task, table.task), cell.name
            assert {*cell.column.figures} <= {*(CORPORA[cell.corpus].scores or cell.column.figures)}, cell.name
    assert all(task.recipe in RECIPES for task in TASKS.values())
    of_suites = {name for name, corpus in CORPORA.items() if corpus.scores}
    assert of_suites == {column.name for table in ("glue", "superglue") for column in TABLES[table].columns}


def test_neither_torch_nor_fairseq_is_loaded():
    """Where a call can do without, which spares it seconds."""
    modules = "from recipes import reproduce, translate; from scripts import make_tables"
    code = f"import sys; {modules}; print({{'fairseq', 'torch'}} & set(sys.modules))"
    assert run_script(sys.executable, "-c", code, cwd=ROOT).stdout == "set()\n"


def test_what_a_cell_is():
    """What it begins with: the same run for all tasks of GLUE. Flags of its own, and what it is compared with."""
    for table, column, first in (
        ("glue_cpu", "cb", "denoising_cpu-wikitext2_spans-random-seed2"),
        ("multi30k_28k", "en-fr", "multi30k_14k-en-fr-random-seed2"),
    ):
        (cell,) = TABLES[table].cells([column], ["random"], [2])
        assert cell.run(Path("out")).init == Path("out", "runs", first)
    (cell,) = TABLES["multi30k_tiled"].cells(models=["random_tile8"])
    run = cell.run(Path())
    assert run.arch == "transformer_synth_random_multi30k" and cell.table.baseline == "random" and not run.init
    assert run.flags == "--synth-max-length 8 --synth-beyond-length tile".split()


@pytest.mark.parametrize("argv, part", [
    ("table2 --dataset en-cs", "--dataset en-cs: choose from en-de, en-fr"),
    ("table2 --variant randm", "--variant randm: choose from transformer, fixed_random"),
    ("cnndm --variant lightcon", "--variant lightcon: choose from"),  # the first stage's baselines may be taken too
    ("table2 --seed one", "--seed.*one"),
    ("table2 --gpus 1 -- --lr 1", "--lr|unrecognized"),  # a table is its recipe
])  # fmt: skip
def test_reproduce_refuses(argv, part):
    assert_refused(reproduce.main, *argv.split(), part=part)


@pytest.mark.parametrize("kind, entry, part", [
    ("Recipe", "a: {like: b}", "'b'"),
    ("Recipe", "a: {preset: x, beams: 4}", "'beams'"),
    ("Table", "a: {title: t, about: t, columns: {x: X}}", "a: "),
])  # fmt: skip
def test_a_slip_in_a_yaml_file_is_told(kind, entry, part, tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "x.yaml").write_text(entry)
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    forms = {"flags": catalog.as_text, "columns": catalog.as_columns}
    assert_refused(
        lambda _: catalog.read_records("x.yaml", getattr(catalog, kind), forms), part=["^recipes/x.yaml: a: ", part]
    )


@pytest.mark.parametrize(
    "name, gpus", [("wmt_en_de", 8), ("wmt_en_fr", 8), ("wmt_en_de_big", 8), ("multi30k", 2), ("multi30k_cpu", 0)]
)
def test_configs_are_the_recipes(name, gpus):
    """Hydra's configs/NAME.yaml and the recipe's command are the same training, in every value that fairseq knows."""
    from fairseq.dataclass.initialize import hydra_init
    from hydra.experimental import compose, initialize_config_dir  # its place in Hydra 1.0
    from omegaconf import OmegaConf

    recipe = RECIPES[name]
    machine = train.Machine(gpus, gpus or 1, precision="bf16" if gpus else "fp32")
    data = {"src": "en", "tgt": "fr" if name.endswith("fr") else "de"}
    words = train.training_command(Run(ROOT, ROOT, recipe, "random_vanilla"), data, machine, [])
    words = words[words.index(str(ROOT / "bin")) :]
    parsed = options.parse_args_and_arch(options.get_training_parser(), input_args=words)
    hydra_init(name)  # as fairseq-hydra-train does: its own defaults become the schema of this name
    with initialize_config_dir(config_dir=str(ROOT / "configs")):
        composed = compose(name, overrides=["common.user_dir=x", "task.data=x", "model.encoder_synthesizer=dense"])
    assert composed.model.decoder_synthesizer == "dense"

    def values(config):
        groups = OmegaConf.to_container(config, enum_to_str=True)
        groups["model"] = vars(groups["model"]) if isinstance(groups["model"], argparse.Namespace) else groups["model"]
        return {
            f"{group}.{key}": str(values_of_group[key])
            for group, values_of_group in groups.items()
            for key in values_of_group or ()
        }

    # of the command line alone, found by fairseq itself, or interpolated from another value
    elsewhere = """common.user_dir distributed_training.distributed_world_size checkpoint.save_dir model._name
        model.arch model.data model.encoder_synthesizer model.decoder_synthesizer task.data""".split()
    composed_values, parsed_values = values(composed), values(convert_namespace_to_omegaconf(parsed))
    places = {
        place
        for place in composed_values.keys() & parsed_values.keys() - {*elsewhere}
        if not composed_values[place].startswith("${")
    }
    assert {place: composed_values[place] for place in places} == {place: parsed_values[place] for place in places}
    flags_of_recipe = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    written = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    keys_of_config = {key for values in written.values() for key in values}
    compared = {place.split(".")[1] for place in (*places, *elsewhere)}
    assert (
        flags_of_recipe | keys_of_config <= compared | {"_name", "optimizer", "criterion", "lr_scheduler"}
        and len(places) > 100
    )
