"""Renders the recipes as Hydra's configs/*.yaml, for fairseq-hydra-train: scripts/make_tables.py."""

import argparse
import warnings
from typing import Any, Dict

from .command import ROOT
from .hyperparameters import RECIPES
from .tables import TABLES
from .train import make_parser, training_command

HEADER = """\
# The recipe {name}, rendered by `python scripts/make_tables.py` from recipes/recipes.yaml and the architectures.
#
#   fairseq-hydra-train --config-dir configs --config-name {name} model.encoder_synthesizer=dense+vanilla \\
#       common.user_dir="$(python -m fairseq_synth)" task.data=/absolute/path/to/bin checkpoint.save_dir=/absolute/path
#
# What is not here has fairseq's default. Without a save_dir each call writes to a folder of its own, so nothing is
# resumed. {device}
# An architecture's name has no effect under Hydra: the sizes stand below.
"""
GPUS = (
    "For {n} GPUs; with another number keep number x optimization.update_freq the same. A GPU that does not\n"
    "# compute in bf16: common.bf16=false common.fp16=true. Another pair of languages: task.target_lang."
)
# said on the command line, or found by fairseq itself
LEFT_OUT = {
    "common": ("user_dir",),
    "distributed_training": ("distributed_world_size",),
    "checkpoint": ("save_dir",),
    "model": ("arch", "data", "encoder_synthesizer", "decoder_synthesizer"),
}


def settings(name: str) -> Dict[str, Dict[str, Any]]:
    """{group: {key: value}} of fairseq's configuration: what a recipe's command says, and its sizes."""
    from fairseq import options
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY
    from omegaconf import OmegaConf

    from fairseq_synth.transformer import SynthesizerTransformerConfig

    recipe = RECIPES[name]
    pairs = [dataset.name for table in TABLES.values() for dataset in table.datasets if dataset.recipe == name]
    arch, pair = recipe.architecture("random_vanilla"), pairs[0] if pairs else "en-de"
    args = make_parser().parse_args([arch, pair, "--gpus", str(recipe.gpus or 0), "--recipe", name])
    args.processes = recipe.hydra_gpus  # stand for the GPUs, so that none is looked for
    command = training_command(args, recipe, ROOT, ROOT, [])
    argv = [word for word in command[command.index(str(ROOT / "bin")) :] if word != "--cpu"]
    parsed = options.parse_args_and_arch(options.get_training_parser(), input_args=argv)
    found: Any = OmegaConf.to_container(convert_namespace_to_omegaconf(parsed), enum_to_str=True)
    found["common"].update({"cpu": True} if recipe.gpus == 0 else {"bf16": True})
    found["model"] = vars(found["model"]) if isinstance(found["model"], argparse.Namespace) else found["model"]

    defaults: Any = OmegaConf.to_container(OmegaConf.structured(FairseqConfig), enum_to_str=True)
    classes = {key: REGISTRIES[key]["dataclass_registry"] for key in ("criterion", "optimizer", "lr_scheduler")}
    for group, registry in {**classes, "task": TASK_DATACLASS_REGISTRY}.items():
        defaults[group] = OmegaConf.to_container(
            OmegaConf.structured(registry[found[group]["_name"]]), enum_to_str=True
        )
    defaults["model"] = OmegaConf.to_container(OmegaConf.structured(SynthesizerTransformerConfig), enum_to_str=True)
    said = {word[2:].replace("-", "_") for word in argv if word.startswith("--")}
    result: Dict[str, Dict[str, Any]] = {}
    for group, default in defaults.items():
        if not isinstance(default, dict) or group == "bmuf":
            continue
        for key, value in (found.get(group) or {}).items():
            if key not in default or str(default[key]).startswith("${") or key in ("_name", *LEFT_OUT.get(group, ())):
                continue
            if key in said or str(default[key]) != str(value):
                result.setdefault(group, {})[key] = value
    for group in ("task", "criterion", "optimizer", "lr_scheduler"):
        result[group] = {"_name": found[group]["_name"], **result.get(group, {})}
    return result


def render() -> Dict[str, str]:
    """{recipe: its YAML}."""
    import yaml

    warnings.simplefilter("ignore")  # Hydra's, of fairseq's use of it
    result = {}
    for name, recipe in RECIPES.items():
        if recipe.task != "translation" or recipe.hydra_gpus is None:
            continue  # `settings` knows the defaults of these models alone
        groups = settings(name)
        groups["common"] = {"user_dir": "???", **groups["common"]}
        groups["task"] = {**groups["task"], "data": "???"}
        both = {"encoder_synthesizer": "random+vanilla", "decoder_synthesizer": "${model.encoder_synthesizer}"}
        groups["model"] = {"_name": "transformer_synth", **both, **groups["model"]}
        device = GPUS.format(n=recipe.hydra_gpus) if recipe.gpus != 0 else "For one process on a CPU."
        result[name] = HEADER.format(name=name, device=device) + yaml.safe_dump(groups, sort_keys=False)
    return result
