"""Every table of the catalog can be run, its entries agree with each other, and Hydra's configs are the recipes."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from helpers import ROOT, assert_refused, run_script

from recipes import catalog, reproduce, train
from recipes.catalog import CORPORA, RECIPES, TABLES, TASKS, Run


def count_stages(cell):
    """Returns the number of trainings one after the other by which a cell's model is made."""
    stages = 1
    first_stage = cell.first_stage()
    while first_stage:
        stages += 1
        first_stage = first_stage.first_stage()
    return stages


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_can_be_run(table, dry_run, capsys, tmp_path):
    """All its commands are shown, its architectures exist, and nothing is written. Its baseline comes first."""
    reproduce.main([table.name, "--seed", "1", "--rerun", "--out", str(tmp_path), "--gpus", "0"])
    output = capsys.readouterr().out
    archs = re.findall(r"^\+ fairseq-train .* --arch (\S+)", output, re.M)
    models = table.models()
    stages = count_stages(table.cells()[0])
    assert len(archs) == len(table.columns) * len(models) * stages
    assert set(archs) <= set(ARCH_CONFIG_REGISTRY)
    assert models[0] == table.baseline
    assert not any(tmp_path.iterdir())
    assert set(table.variations) <= set(models)
    assert len(table.published()) <= len(models)


def assert_recipe_is_consistent(recipe):
    """Checks that the values of a recipe agree with each other, and that its first stage exists."""
    flags = recipe.flags
    if recipe.average and recipe.save_every:
        # Checkpoints with a number, which an average can take, are written only at multiples of save_every.
        assert recipe.max_update % recipe.save_every == 0, recipe.name
    if flags.get("criterion") == "adaptive_loss":
        assert flags["ddp-backend"] == "legacy_ddp", recipe.name  # fairseq's criterion refuses torch's DDP
    if flags.get("criterion") == "sentence_prediction":
        assert "find-unused-parameters" in flags, recipe.name  # fairseq's classifier leaves RoBERTa's own head out
    if "tokens-per-sample" in flags:
        # Otherwise the rows of a batch are a multiple of 8, and depend on the number of GPUs.
        assert flags["required-batch-size-multiple"] == "1", recipe.name
    if recipe.init:
        assert recipe.init in TABLES, recipe.name


class Preparation(NamedTuple):
    """How the data of a cell are prepared."""

    corpus: str
    options: dict[str, Any]  # options of prepare.sh
    data_with_same_words: Path | None  # the folder of the first stage's data, if it is another one


def describe_preparation(cell):
    """Returns how the data of a cell are prepared."""
    data_of_first_stage = None
    first_stage = cell.first_stage()
    if first_stage and first_stage.run(Path()).data != cell.run(Path()).data:
        data_of_first_stage = first_stage.run(Path()).data
    return Preparation(cell.corpus, dict(cell.table.preparation), data_of_first_stage)


def assert_cell_is_consistent(cell):
    """Checks that the recipe of a cell is for the table's task, and that its corpus has the figures to be shown."""
    expected_task = train.FAIRSEQ_TASK.get(cell.table.task, cell.table.task)
    assert cell.recipe.task == expected_task, cell.name
    scores_of_corpus = CORPORA[cell.corpus].scores
    if scores_of_corpus:
        assert set(cell.column.figures) <= set(scores_of_corpus), cell.name


def test_tables_and_recipes_are_consistent():
    """No folder of data has two preparations, and the corpora with scores of their own are those of GLUE, SuperGLUE."""
    for recipe in RECIPES.values():
        assert_recipe_is_consistent(recipe)

    preparations = {}  # {folder of data: how they are prepared}
    for table in TABLES.values():
        for cell in table.cells():
            assert_cell_is_consistent(cell)
            data = cell.run(Path()).data
            preparation = describe_preparation(cell)
            if data not in preparations:
                preparations[data] = preparation
            assert preparations[data] == preparation, cell.name

    for task in TASKS.values():
        assert task.recipe in RECIPES

    corpora_with_scores = {name for name, corpus in CORPORA.items() if corpus.scores}
    columns_of_suites = [*TABLES["glue"].columns, *TABLES["superglue"].columns]
    assert corpora_with_scores == {column.name for column in columns_of_suites}


def test_calls_that_can_do_without_torch_and_fairseq_do_not_load_them():
    """This spares such a call seconds."""
    modules = "from recipes import reproduce, translate; from scripts import make_tables"
    code = f"import sys; {modules}; print({{'fairseq', 'torch'}} & set(sys.modules))"
    process = run_script(sys.executable, "-c", code, cwd=ROOT)
    assert process.stdout == "set()\n"


def test_a_cell_is_a_run_with_its_own_first_stage_and_flags():
    """All tasks of GLUE start from the same run. A row with flags of its own is compared with the table's baseline."""
    for table, column, first_stage in (
        ("glue_cpu", "cb", "denoising_cpu-wikitext2_spans-random-seed2"),
        ("multi30k_28k", "en-fr", "multi30k_14k-en-fr-random-seed2"),
    ):
        (cell,) = TABLES[table].cells([column], ["random"], [2])
        assert cell.run(Path("out")).init == Path("out", "runs", first_stage)

    (cell,) = TABLES["multi30k_tiled"].cells(models=["random_tile8"])
    run = cell.run(Path())
    assert run.arch == "transformer_synth_random_multi30k"
    assert cell.table.baseline == "random"
    assert not run.init
    assert run.flags == ["--synth-max-length", "8", "--synth-beyond-length", "tile"]


@pytest.mark.parametrize("argv, part", [
    ("table2 --dataset en-cs", "--dataset en-cs: choose from en-de, en-fr"),
    ("table2 --variant randm", "--variant randm: choose from transformer, fixed_random"),
    ("cnndm --variant lightcon", "--variant lightcon: choose from"),  # baselines of the first stage may be taken, too
    ("table2 --seed one", "--seed.*one"),
    ("table2 --gpus 1 -- --lr 1", "--lr|unrecognized"),  # a table has only its recipe's flags
])  # fmt: skip
def test_reproduce_refuses_wrong_arguments(argv, part):
    assert_refused(reproduce.main, *argv.split(), part=part)


@pytest.mark.parametrize("record_type, entry, part", [
    ("Recipe", "a: {like: b}", "'b'"),
    ("Recipe", "a: {preset: x, beams: 4}", "'beams'"),
    ("Table", "a: {title: t, about: t, columns: {x: X}}", "a: "),
])  # fmt: skip
def test_a_wrong_entry_in_a_yaml_file_is_named(record_type, entry, part, tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "x.yaml").write_text(entry)
    monkeypatch.setattr(catalog, "ROOT", tmp_path)

    def read_file(argv):
        """Reads the YAML file; there are no arguments."""
        converters = {"flags": catalog.as_text, "columns": catalog.as_columns}
        return catalog.read_records("x.yaml", getattr(catalog, record_type), converters)

    assert_refused(read_file, part=["^recipes/x.yaml: a: ", part])


# Values that only the command line has, that fairseq finds itself, or that are interpolated from another value.
NOT_COMPARED = {
    "common.user_dir",
    "distributed_training.distributed_world_size",
    "checkpoint.save_dir",
    "model._name",
    "model.arch",
    "model.data",
    "model.encoder_synthesizer",
    "model.decoder_synthesizer",
    "task.data",
}


def list_values(config):
    """Returns the values of fairseq's configuration as strings, {"group.key": value}."""
    from omegaconf import OmegaConf

    groups = OmegaConf.to_container(config, enum_to_str=True)
    if isinstance(groups["model"], argparse.Namespace):
        groups["model"] = vars(groups["model"])
    values = {}
    for group, values_of_group in groups.items():
        if values_of_group:
            for key, value in values_of_group.items():
                values[f"{group}.{key}"] = str(value)
    return values


def list_keys_of_config(name):
    """Returns the keys of all groups in the file configs/NAME.yaml."""
    groups = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    keys = set()
    for values_of_group in groups.values():
        keys.update(values_of_group)
    return keys


@pytest.mark.parametrize(
    "name, gpus", [("wmt_en_de", 8), ("wmt_en_fr", 8), ("wmt_en_de_big", 8), ("multi30k", 2), ("multi30k_cpu", 0)]
)
def test_configs_are_the_recipes(name, gpus):
    """Hydra's configs/NAME.yaml and the recipe's command are the same training, in every value that fairseq knows."""
    from fairseq.dataclass.initialize import hydra_init
    from hydra.experimental import compose, initialize_config_dir  # where Hydra 1.0 has them

    # the configuration of the recipe's command
    precision = "bf16" if gpus else "fp32"
    machine = train.Machine(gpus, gpus or 1, precision=precision)
    target_language = "fr" if name.endswith("fr") else "de"
    settings = {"src": "en", "tgt": target_language}
    run = Run(folder=ROOT, data=ROOT, recipe=RECIPES[name], model="random_vanilla")
    command = train.training_command(run, settings, machine, [])
    arguments = command[command.index(str(ROOT / "bin")) :]
    parsed = options.parse_args_and_arch(options.get_training_parser(), input_args=arguments)
    parsed_values = list_values(convert_namespace_to_omegaconf(parsed))

    # Hydra's configuration
    hydra_init(name)  # fairseq-hydra-train calls it, too: its own defaults become the schema of this name
    with initialize_config_dir(config_dir=str(ROOT / "configs")):
        composed = compose(name, overrides=["common.user_dir=x", "task.data=x", "model.encoder_synthesizer=dense"])
    assert composed.model.decoder_synthesizer == "dense"
    composed_values = list_values(composed)

    # All values that both configurations have are equal.
    common_keys = composed_values.keys() & parsed_values.keys()
    compared_keys = set()
    for key in common_keys - NOT_COMPARED:
        is_interpolated = composed_values[key].startswith("${")
        if not is_interpolated:
            compared_keys.add(key)
    composed_and_compared = {key: composed_values[key] for key in compared_keys}
    parsed_and_compared = {key: parsed_values[key] for key in compared_keys}
    assert composed_and_compared == parsed_and_compared
    assert len(compared_keys) > 100

    # No flag of the recipe and no key of the config has been left out.
    flags_of_recipe = {word[2:].replace("-", "_") for word in arguments if word.startswith("--")}
    known_names = {key.split(".")[1] for key in compared_keys | NOT_COMPARED}
    names_of_groups = {"_name", "optimizer", "criterion", "lr_scheduler"}
    assert flags_of_recipe | list_keys_of_config(name) <= known_names | names_of_groups
