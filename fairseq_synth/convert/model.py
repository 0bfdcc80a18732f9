"""Builds the new model from the old one, and writes its checkpoint."""

import argparse
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

LOST_STATE = ("best", "ema")  # of the training: the best loss of the old model, and averages of its weights


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
    prefixes = {id(module): f"{name}." for name, module in loaded.model.named_modules()}
    specs: dict[str, list[str]] = {}  # {stack: the value of --encoder-synthesizer for each layer}
    for attention in self_attentions(loaded.model):
        replaced = {head.number for head in heads if head.attention == attention.name}
        function = conversion.functions.get(attention.name, "")
        values = parameters.get(attention.name, {})
        spec = replace_heads(state, prefixes[id(attention.module)], attention, replaced, function, values)
        specs.setdefault(attention.stack, []).append(spec)
    cfg = make_config(loaded, conversion, specs, max_length)
    model = loaded.task.build_model(OmegaConf.create(cfg)).float().eval()
    model.load_state_dict(state, strict=True)
    return NewModel(cfg, model)


def make_config(loaded: Loaded, conversion: Conversion, specs: dict[str, list[str]], max_length: int) -> dict[str, Any]:
    """Returns the model's part of fairseq's config: that of the old model, with the functions of each layer."""
    old = loaded.cfg.model
    values: Any
    if isinstance(old, argparse.Namespace):
        values = dict(vars(old))
    else:
        values = OmegaConf.to_container(old, resolve=True)
    for stack, layers in specs.items():
        are_alike = len(set(layers)) == 1
        values[f"{stack}_synthesizer"] = layers[0] if are_alike else ",".join(layers)
    values["synth_max_length"] = max_length
    values["synth_rank"] = conversion.rank
    model_class: Any = MODEL_REGISTRY[conversion.model_name]
    complete = vars(model_class.read_config(argparse.Namespace(**values), loaded.task))
    fields = MODEL_DATACLASS_REGISTRY[conversion.model_name].__dataclass_fields__
    cfg = {name: complete[name] for name in fields if name in complete}
    cfg["_name"] = conversion.model_name
    return cfg


def save_checkpoint(old_path: Path, new_path: Path, new: NewModel) -> dict[str, Any]:
    """Writes the checkpoint: the old one with another model, without the optimizer's state, which would not fit.

    Returns:
        its config.
    """
    checkpoint = checkpoint_utils.load_checkpoint_to_cpu(str(old_path))
    cfg: Any = OmegaConf.to_container(read_config(old_path, checkpoint), resolve=True, enum_to_str=True)
    cfg["model"] = new.cfg
    # so that nobody takes the new model for trained from scratch
    cfg["checkpoint"]["finetune_from_model"] = str(old_path)
    extra_state = dict(checkpoint.get("extra_state") or {})
    for name in LOST_STATE:
        extra_state.pop(name, None)
    checkpoint["args"] = None  # of older versions, in place of the config
    checkpoint["cfg"] = cfg
    checkpoint["model"] = new.model.state_dict()
    checkpoint["last_optimizer_state"] = None
    checkpoint["extra_state"] = extra_state
    checkpoint_utils.torch_persistent_save(checkpoint, str(new_path))
    return dict(cfg)
