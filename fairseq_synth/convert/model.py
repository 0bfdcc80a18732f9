"""Builds the new model from the old one, and writes its checkpoint."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq import checkpoint_utils
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from omegaconf import OmegaConf
from torch import Tensor, nn

from ..inspect.attentions import Head, self_attentions
from ..inspect.checkpoints import Loaded, read_config
from .conversion import Conversion
from .heads import replace_heads

# Entries of a checkpoint that belong to the old model alone: its best loss, and averages of its weights.
LOST_STATE = ("best", "ema")


class NewModel(NamedTuple):
    """A converted model."""

    cfg: dict[str, Any]  # the model's part of fairseq's config
    model: nn.Module


def build_model(
    loaded: Loaded,
    conversion: Conversion,
    parameters: dict[str, dict[str, Tensor]],
    heads: Sequence[Head],
    max_length: int,
) -> NewModel:
    """Returns the new model in eval mode: the old model with other functions in some heads.

    Args:
        loaded: the old model.
        conversion: the class of the new model, and the new function of each self-attention.
        parameters: {name of a self-attention: {name: parameter of its new function, for all heads}}.
        heads: the heads to replace.
        max_length: ``--synth-max-length`` of the new model.
    """
    state = dict(loaded.model.state_dict())
    # what the keys of each module begin with in the state dict
    key_prefixes = {id(module): f"{name}." for name, module in loaded.model.named_modules()}
    layer_specs: dict[str, list[str]] = {}
    for attention in self_attentions(loaded.model):
        replaced_heads = {head.number for head in heads if head.attention == attention.name}
        # This changes the weights in `state`, and returns the flag's value for the layer. An attention without replaced
        # heads keeps its weights, but its functions have to be listed too.
        layer_spec = replace_heads(
            state,
            prefix=key_prefixes[id(attention.module)],
            attention=attention,
            replaced=replaced_heads,
            function=conversion.functions.get(attention.name, ""),
            parameters=parameters.get(attention.name, {}),
        )
        layer_specs.setdefault(attention.stack, []).append(layer_spec)
    cfg = make_config(loaded, conversion, layer_specs, max_length)
    model = loaded.task.build_model(OmegaConf.create(cfg)).float().eval()
    model.load_state_dict(state, strict=True)
    return NewModel(cfg, model)


def make_config(
    loaded: Loaded, conversion: Conversion, layer_specs: dict[str, list[str]], max_length: int
) -> dict[str, Any]:
    """Returns the new model's part of fairseq's config: {name of a flag: its value} for every flag of the new class.

    A flag that the old model has too keeps its value, except for the flags of the new functions. A flag that the old
    model does not have gets its default. Flags that only the old model has are left out.

    Args:
        loaded: the old model.
        conversion: the class of the new model, and its rank.
        layer_specs: {``encoder`` or ``decoder``: the value of ``--encoder-synthesizer`` for each of its layers}.
        max_length: ``--synth-max-length``.
    """
    # The settings of the old model, and those of the new functions.
    settings = read_settings(loaded.cfg.model)
    for stack, specs in layer_specs.items():
        are_alike = len(set(specs)) == 1
        settings[f"{stack}_synthesizer"] = specs[0] if are_alike else ",".join(specs)
    settings["synth_max_length"] = max_length
    settings["synth_rank"] = conversion.rank
    # `read_config` adds the default of each flag of the new class that is missing.
    model_class: Any = MODEL_REGISTRY[conversion.model_name]
    settings_with_defaults = model_class.read_config(argparse.Namespace(**settings), loaded.task)
    # Only the flags of the new class are kept.
    cfg: dict[str, Any] = {}
    for flag in dataclasses.fields(MODEL_DATACLASS_REGISTRY[conversion.model_name]):
        cfg[flag.name] = getattr(settings_with_defaults, flag.name)
    cfg["_name"] = conversion.model_name
    return cfg


def read_settings(model_cfg: Any) -> dict[str, Any]:
    """Returns the settings in a model's config as {name of a flag: its value}.

    Args:
        model_cfg: a Namespace in a checkpoint of an older fairseq, otherwise a DictConfig.
    """
    if isinstance(model_cfg, argparse.Namespace):
        return dict(vars(model_cfg))
    settings: Any = OmegaConf.to_container(model_cfg, resolve=True)
    return settings


def save_checkpoint(old_path: Path, new_path: Path, new: NewModel) -> dict[str, Any]:
    """Writes the checkpoint of the new model, and returns fairseq's config that it contains.

    The rest of the checkpoint is that of the old model, but without the state of the optimizer, which has the shapes of
    the old parameters.

    Args:
        old_path: the checkpoint of the old model.
        new_path: the file to write.
        new: the new model.
    """
    checkpoint = checkpoint_utils.load_checkpoint_to_cpu(str(old_path))
    cfg: Any = OmegaConf.to_container(read_config(old_path, checkpoint), resolve=True, enum_to_str=True)
    cfg["model"] = new.cfg
    # This tells users, and `Loaded.initial`, that the new model was not trained from scratch.
    cfg["checkpoint"]["finetune_from_model"] = str(old_path)
    extra_state = dict(checkpoint.get("extra_state") or {})
    for name in LOST_STATE:
        extra_state.pop(name, None)
    checkpoint["args"] = None  # In older versions of fairseq, this was the config.
    checkpoint["cfg"] = cfg
    checkpoint["model"] = new.model.state_dict()
    checkpoint["last_optimizer_state"] = None
    checkpoint["extra_state"] = extra_state
    checkpoint_utils.torch_persistent_save(checkpoint, str(new_path))
    return dict(cfg)
