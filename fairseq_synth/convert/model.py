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

# What a checkpoint says of the old model alone: its best loss, and averages of its weights.
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
    """Returns the new model in eval mode.

    Args:
        loaded: the old model.
        conversion: what it is to become.
        parameters: {self-attention: the parameters of its new function by name, for all heads}.
        heads: the heads to replace.
        max_length: ``--synth-max-length``.
    """
    state = dict(loaded.model.state_dict())
    prefixes = {id(module): f"{name}." for name, module in loaded.model.named_modules()}  # of keys in the state dict
    layer_specs: dict[str, list[str]] = {}  # {stack: what --encoder-synthesizer says of each of its layers}
    for attention in self_attentions(loaded.model):
        layer_spec = replace_heads(
            state,
            prefix=prefixes[id(attention.module)],
            attention=attention,
            replaced={head.number for head in heads if head.attention == attention.name},
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
    """Returns the model's part of fairseq's config: that of the old model, with the functions of each layer.

    It has exactly the flags of the new model's class. Those that the old class lacks get their defaults, and those of
    the old class alone are left out.

    Args:
        loaded: the old model.
        conversion: what it is to become.
        layer_specs: {stack: what ``--encoder-synthesizer`` says of each of its layers}.
        max_length: ``--synth-max-length``.
    """
    flags = read_flags(loaded.cfg.model)
    for stack, specs in layer_specs.items():
        are_alike = len(set(specs)) == 1
        flags[f"{stack}_synthesizer"] = specs[0] if are_alike else ",".join(specs)
    flags["synth_max_length"] = max_length
    flags["synth_rank"] = conversion.rank
    model_class: Any = MODEL_REGISTRY[conversion.model_name]
    with_defaults = model_class.read_config(argparse.Namespace(**flags), loaded.task)
    cfg: dict[str, Any] = {}
    for field in dataclasses.fields(MODEL_DATACLASS_REGISTRY[conversion.model_name]):
        cfg[field.name] = getattr(with_defaults, field.name)
    cfg["_name"] = conversion.model_name
    return cfg


def read_flags(model_cfg: Any) -> dict[str, Any]:
    """Returns the flags in a model's config as a dict; a checkpoint has a Namespace or a DictConfig."""
    if isinstance(model_cfg, argparse.Namespace):
        return dict(vars(model_cfg))
    flags: Any = OmegaConf.to_container(model_cfg, resolve=True)
    return flags


def save_checkpoint(old_path: Path, new_path: Path, new: NewModel) -> dict[str, Any]:
    """Writes the new checkpoint: the old one with another model, without the optimizer's state, which would not fit.

    Returns:
        the config in the new checkpoint.
    """
    checkpoint = checkpoint_utils.load_checkpoint_to_cpu(str(old_path))
    cfg: Any = OmegaConf.to_container(read_config(old_path, checkpoint), resolve=True, enum_to_str=True)
    cfg["model"] = new.cfg
    # This tells users, and `Loaded.initial`, that the new model was not trained from scratch.
    cfg["checkpoint"]["finetune_from_model"] = str(old_path)
    extra_state = dict(checkpoint.get("extra_state") or {})
    for name in LOST_STATE:
        extra_state.pop(name, None)
    checkpoint["args"] = None  # where older versions of fairseq keep the config
    checkpoint["cfg"] = cfg
    checkpoint["model"] = new.model.state_dict()
    checkpoint["last_optimizer_state"] = None
    checkpoint["extra_state"] = extra_state
    checkpoint_utils.torch_persistent_save(checkpoint, str(new_path))
    return dict(cfg)
