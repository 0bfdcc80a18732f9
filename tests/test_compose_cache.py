"""The cache of configurations gives what Hydra gives."""

import argparse
import copy
from pathlib import Path
from unittest import mock

import fairseq
import pytest
from compose_cache import CachedCompose, find_calling_file
from fairseq import options
from fairseq.dataclass import utils
from helpers import RECIPE, SMALL
from hydra import initialize_config_dir
from hydra._internal.utils import detect_calling_file_or_module_from_stack_frame
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

HYDRA_COMPOSE = utils.compose  # imported before the fixture of conftest.py replaces it
STOCK_SIZE = [word for word in SMALL if word not in ("--synth-max-length", "24")]
SYNTHESIZER = "transformer_synth_random_vanilla_multi30k"
COMMANDS = [
    ["--arch", "transformer_multi30k", *STOCK_SIZE],
    ["--arch", SYNTHESIZER, *SMALL, "--decoder-synthesizer", "random:1/dense+vanilla:1"],
    # the groups of the command before with other values: lists, quotes, JSON, brackets
    ["--arch", SYNTHESIZER, *SMALL, "--adam-betas", "(0.9, 0.98)", "--lr", "0.1,0.2", "--update-freq", "2,1"]
    + ["--eval-bleu", "--eval-bleu-args", '{"beam": 2, "prefix_size": 1}', "--save-dir", "a, b=[c]"],
    ["--arch", SYNTHESIZER, *SMALL, "--lr-scheduler", "inverse_sqrt", "--warmup-init-lr", "1e-7"],
]


def to_config(compose, argv):
    """Returns fairseq's configuration of a command line of fairseq-train, as {group: values}."""
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=["data", *RECIPE, *argv])
    with mock.patch.object(utils, "compose", compose):
        config = utils.convert_namespace_to_omegaconf(copy.deepcopy(args))
    return {key: vars(group) if isinstance(group, argparse.Namespace) else group for key, group in config.items()}


def test_a_cached_configuration_is_hydras():
    """Every value and its type, also where the groups are cached from a command with other values."""
    cached_compose = CachedCompose(HYDRA_COMPOSE)
    for argv in COMMANDS:
        expected, cached = to_config(HYDRA_COMPOSE, argv), to_config(cached_compose, argv)
        assert cached == expected and repr(cached) == repr(expected)


@pytest.mark.parametrize(
    "arch, flags",
    {
        "transformer_multi30k": ["--task", "translation"],
        SYNTHESIZER: ["--task", "translation"],
        "transformer_lm_synth_random_ptb": ["--task", "language_modeling"],
        "roberta_synth_random_agnews": ["--task", "masked_lm"],
        "roberta_linformer_agnews": ["--task", "masked_lm"],
    }.items(),
)
def test_every_kind_of_model_is_cached(arch, flags):
    """The second command of a model needs no composition by Hydra, also where a model makes its class of flags."""
    hydra = mock.Mock(side_effect=HYDRA_COMPOSE)
    cached_compose = CachedCompose(hydra)
    to_config(cached_compose, ["--arch", arch, *flags])
    to_config(cached_compose, ["--arch", arch, *flags])
    assert hydra.call_count == 1


def compose_in_hydra(compose, overrides):
    """Calls a `compose` as fairseq does, with the folder of its YAML files."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(fairseq.__file__).parent / "config")):
        return compose("config", overrides=overrides, strict=False)


def test_groups_are_composed_once():
    """Hydra composes the configuration of a group once, and each command gets a copy with its own values.

    Hydra composes it again as soon as another schema is registered by the same name.
    """
    hydra = mock.Mock(side_effect=HYDRA_COMPOSE)
    cached_compose = CachedCompose(hydra)

    # The third command sets the value of the first one again. It must not get the value 4 of the second one.
    first = compose_in_hydra(cached_compose, ["task=translation", "optimization.max_update=3"])
    first.task.source_lang = "xx"  # a change of the configuration that was returned must not get into the cache
    second = compose_in_hydra(cached_compose, ["task=translation", "optimization.max_update=4"])
    third = compose_in_hydra(cached_compose, ["task=translation", "optimization.max_update=3"])
    assert hydra.call_count == 1
    assert [config.optimization.max_update for config in (first, second, third)] == [3, 4, 3]
    assert second.task.source_lang is None

    # A copy of the schema is another object, so it counts as another schema, though its name and entries are the same.
    schemas = ConfigStore.instance().repo["task"]
    another_schema = copy.deepcopy(schemas["translation.yaml"])
    with mock.patch.dict(schemas, {"translation.yaml": another_schema}):
        compose_in_hydra(cached_compose, ["task=translation", "optimization.max_update=4"])
    assert hydra.call_count == 2


@pytest.mark.parametrize(
    "override",
    ["optimization.max_update=many", "optimization.max_update=[", "optimizer=nothing", "optimization.nothing=1"],
)
def test_an_error_is_hydras(override):
    """A value of another type, a value that cannot be read, and names that do not exist."""
    messages = []
    for compose in (HYDRA_COMPOSE, CachedCompose(HYDRA_COMPOSE)):
        try:
            messages.append(compose_in_hydra(compose, [override]))
        except Exception as error:
            messages.append((type(error), str(error)))
    assert messages[0] == messages[1]


def call_at_depth(function, stack_depth):
    """Calls a function that looks for its caller in the stack."""
    return function(stack_depth)


def call_from_a_lambda(function):
    return (lambda: function(1))()


def test_the_calling_file_is_the_one_that_hydra_finds():
    """For a function of a module, for its caller, and for a function without a name, which has no module."""
    hydras = detect_calling_file_or_module_from_stack_frame
    assert call_at_depth(find_calling_file, 1) == call_at_depth(hydras, 1) == (__file__, __name__)
    assert call_at_depth(find_calling_file, 2) == call_at_depth(hydras, 2) == (__file__, __name__)
    assert call_from_a_lambda(find_calling_file) == call_from_a_lambda(hydras) == (__file__, None)
