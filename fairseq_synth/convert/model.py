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

from ..checkpoint_compatibility import select_prefix
from ..inspect.attentions import Head, self_attentions
from ..inspect.checkpoints import Loaded, read_config
from .conversion import Conversion
from .heads import describe_groups, replace_heads

# Entries of "extra_state" in a checkpoint that the new checkpoint must not have, because they belong to the old model
# alone: its best loss, and averages of its weights.
LOST_STATE = ("best", "ema")


class NewModel(NamedTuple):
    """A converted model."""

    cfg: dict[str, Any]  # the model's part of fairseq's config: {name of a flag: its value}
    model: nn.Module


class NewWeights(NamedTuple):
    """The weights of a converted model.

    Attributes:
        state: the model's state dict.
        layer_specs: {``encoder`` or ``decoder``: the value of ``--encoder-synthesizer`` for each of its layers}.
    """

    state: dict[str, Tensor]
    layer_specs: dict[str, list[str]]


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
    weights = convert_weights(loaded.model, conversion, parameters, heads)
    cfg = make_config(loaded, conversion, weights.layer_specs, max_length)
    model = loaded.task.build_model(OmegaConf.create(cfg))
    model = model.float().eval()  # in fp32, as the old model
    model.load_state_dict(weights.state, strict=True)
    return NewModel(cfg=cfg, model=model)


def convert_weights(
    model: nn.Module, conversion: Conversion, parameters: dict[str, dict[str, Tensor]], heads: Sequence[Head]
) -> NewWeights:
    """Returns the weights of the new model, which may share tensors with the old model; the old model is not changed.

    Only self-attentions with heads to replace get new weights.

    Args:
        model: the old model.
        conversion: the new function of each self-attention.
        parameters: {name of a self-attention: {name: parameter of its new function, for all heads}}.
        heads: the heads to replace.
    """
    state = dict(model.state_dict())
    layer_specs: dict[str, list[str]] = {}
    for attention in self_attentions(model):
        heads_to_replace = {head.number for head in heads if head.attention == attention.name}
        if heads_to_replace:
            # The keys of this attention, and of no other, begin with the prefix.
            prefix = find_prefix(model, attention.module)
            new_attention = replace_heads(
                select_prefix(state, prefix),
                attention=attention,
                replaced=heads_to_replace,
                function=conversion.functions[attention.name],
                parameters=parameters[attention.name],
            )
            state = replace_entries(state, prefix, new_attention.state)
            layer_spec = new_attention.layer_spec
        else:
            layer_spec = describe_groups(attention.head_groups())  # as in the old model
        layer_specs.setdefault(attention.stack, []).append(layer_spec)
    return NewWeights(state=state, layer_specs=layer_specs)


def find_prefix(model: nn.Module, module: nn.Module) -> str:
    """Returns what the keys of a module in the model's state dict begin with: ``encoder.layers.0.self_attn.``."""
    names = [name for name, candidate in model.named_modules() if candidate is module]
    return f"{names[0]}."


def replace_entries(state: dict[str, Tensor], prefix: str, entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a model's state dict with other weights for one module.

    Args:
        state: the state dict of the model, which is not changed.
        prefix: the keys of the module begin with it.
        entries: the new state dict of the module, with keys that lack the prefix.
    """
    new_state = {key: value for key, value in state.items() if not key.startswith(prefix)}
    for key, value in entries.items():
        new_state[prefix + key] = value
    return new_state


def make_config(
    loaded: Loaded, conversion: Conversion, layer_specs: dict[str, list[str]], max_length: int
) -> dict[str, Any]:
    """Returns the new model's part of fairseq's config: {name of a flag: its value} for every flag of the new class.

    A flag that describes the new functions, such as ``--synth-rank``, has their value. All other flags have the value
    of the old model. If the old model has no such flag, they have the default of the new class.

    Args:
        loaded: the old model.
        conversion: the class of the new model, and its rank.
        layer_specs: {``encoder`` or ``decoder``: the value of ``--encoder-synthesizer`` for each of its layers}.
        max_length: ``--synth-max-length``.
    """
    # The flags of the old model, and then those of the functions, which replace values of the old model.
    settings = read_settings(loaded.cfg.model)  # a new dict
    settings["synth_max_length"] = max_length
    settings["synth_rank"] = conversion.rank
    for stack, specs in layer_specs.items():
        flag = f"{stack}_synthesizer"  # encoder_synthesizer or decoder_synthesizer
        settings[flag] = join_layer_specs(specs)

    # Now every flag of the new class gets a value. But there may also be flags that only the old class has.
    settings_with_defaults = add_defaults(settings, loaded, conversion.model_name)
    flags_of_new_class = dataclasses.fields(MODEL_DATACLASS_REGISTRY[conversion.model_name])
    cfg = {flag.name: settings_with_defaults[flag.name] for flag in flags_of_new_class}
    cfg["_name"] = conversion.model_name
    return cfg


def add_defaults(settings: dict[str, Any], loaded: Loaded, new_model_name: str) -> dict[str, Any]:
    """Returns the settings, and the default of each flag of the new model's class that is not among them.

    Args:
        settings: {name of a flag: its value}, which stays as it is.
        loaded: the old model, for its task.
        new_model_name: the name under which fairseq knows the class of the new model.
    """
    new_class: Any = MODEL_REGISTRY[new_model_name]
    complete_settings = new_class.read_config(argparse.Namespace(**settings), loaded.task)
    return dict(vars(complete_settings))


def join_layer_specs(specs: list[str]) -> str:
    """Returns the value of ``--encoder-synthesizer`` for a stack of layers.

    If all layers are alike, this is the value for a single layer: ["dense", "dense"] -> "dense". Otherwise it lists
    the values for all layers: ["dense", "random"] -> "dense,random".
    """
    are_alike = len(set(specs)) == 1
    if are_alike:
        return specs[0]
    return ",".join(specs)


def read_settings(model_cfg: Any) -> dict[str, Any]:
    """Returns the settings in a model's config as a new dict {name of a flag: its value}.

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
    checkpoint["cfg"] = cfg
    checkpoint["args"] = None  # In older versions of fairseq, this was the config.
    checkpoint["model"] = new.model.state_dict()
    checkpoint["last_optimizer_state"] = None
    # What belongs to the old model alone is left out.
    old_extra_state = checkpoint.get("extra_state") or {}
    checkpoint["extra_state"] = {name: value for name, value in old_extra_state.items() if name not in LOST_STATE}
    checkpoint_utils.torch_persistent_save(checkpoint, str(new_path))
    return dict(cfg)
