"""The tests' own short cuts are what they stand for."""

import argparse
import copy

import pytest
from composed import composed_once
from fairseq import options
from fairseq.dataclass import utils
from helpers import RECIPE, SMALL
from hydra import initialize
from hydra.core.global_hydra import GlobalHydra

REAL = utils.compose  # imported before any fixture replaces it
STOCK_SIZE = [word for word in SMALL if word not in ("--synth-max-length", "24")]
COMMANDS = [
    ["--arch", "transformer_multi30k", *STOCK_SIZE],
    [
        "--arch",
        "transformer_synth_random_vanilla_multi30k",
        *SMALL,
        "--decoder-synthesizer",
        "random:1/dense+vanilla:1",
    ],
    ["--arch", "transformer_synth_random_vanilla_multi30k", *SMALL, "--adam-betas", "(0.9, 0.98)", "--lr", "0.1,0.2"]
    + ["--update-freq", "2,1", "--eval-bleu", "--eval-bleu-args", '{"beam": 2, "prefix_size": 1}']
    + ["--save-dir", "a, b=[c]", "--lr-scheduler", "inverse_sqrt", "--warmup-init-lr", "1e-7"],
]


def values(config):
    """Of a configuration, where a namespace may stand for a group."""
    return {key: vars(group) if isinstance(group, argparse.Namespace) else group for key, group in config.items()}


def test_a_composition_with_a_memory_is_hydras(monkeypatch):
    """Every value of the configuration, also when its groups are known from a command with other values."""
    once = composed_once(REAL)
    for argv in COMMANDS:
        args = options.parse_args_and_arch(options.get_training_parser(), input_args=["data", *RECIPE, *argv])
        found = []
        for compose in (REAL, once):
            monkeypatch.setattr(utils, "compose", compose)
            found.append(values(utils.convert_namespace_to_omegaconf(copy.deepcopy(args))))
        assert found[0] == found[1] and repr(found[0]) == repr(found[1])


def test_an_error_of_hydra_stays_hydras():
    """A value of another type, one that cannot be read, and a name that there is not."""

    def said(compose, words):
        GlobalHydra.instance().clear()
        with initialize(config_path=None):
            with pytest.raises(Exception) as error:  # noqa: B017
                compose("config", overrides=words, strict=False)
        return type(error.value), str(error.value)

    for words in (["optimization.max_update=many"], ["optimization.max_update=["], ["optimizer=nothing"]):
        assert said(REAL, words) == said(composed_once(REAL), words)
