"""Builds the new model from the old one, and writes its checkpoint."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq import checkpoint_utils
from fairseq.models import MODEL_REGISTRY
from omegaconf import OmegaConf
from torch import Tensor, nn

from ..checkpoint_compatibility import select_prefix
from ..inspect.attentions import Attention, Head, self_attentions
from ..inspect.checkpoints import Loaded, read_config
from .conversion import Conversion
from .heads import NewAttention, describe_groups, replace_heads

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
    """Returns the weights of the new model. The old model is not changed, but both may share tensors.

    Args:
        model: the old model.
        conversion: the new function of each self-attention.
        parameters: {name of a self-attention: {name: parameter of its new function, for all heads}}.
        heads: the heads to replace.
    """
    old_state = model.state_dict()
    new_state = dict(old_state)
    layer_specs: dict[str, list[str]] = {}
    for attention in self_attentions(model):  # in each stack, layer by layer
        prefix = find_prefix(model, attention.module)  # The keys of this attention, and of no other, begin with it.
        old_attention_state = select_prefix(old_state, prefix)
        new_attention = convert_attention(attention, old_attention_state, conversion, parameters, heads)
        new_state = replace_entries(new_state, prefix, new_attention.state)
        layer_specs.setdefault(attention.stack, []).append(new_attention.layer_spec)
    return NewWeights(state=new_state, layer_specs=layer_specs)


def convert_attention(
    attention: Attention,
    old_state: dict[str, Tensor],
    conversion: Conversion,
    parameters: dict[str, dict[str, Tensor]],
    heads: Sequence[Head],
) -> NewAttention:
    """Returns the weights of a self-attention in the new model; the old weights if none of its heads is replaced.

    Args:
        attention: the self-attention of the old model.
        old_state: its state dict, which is not changed.
        conversion: the new function of each self-attention.
        parameters: {name of a self-attention: {name: parameter of its new function, for all heads}}.
        heads: the heads to replace, of all self-attentions.
    """
    replaced = {head.number for head in heads if head.attention == attention.name}
    if not replaced:
        return NewAttention(state=old_state, layer_spec=describe_groups(attention.head_groups()))
    return replace_heads(
        old_state,
        attention=attention,
        replaced=replaced,
        function=conversion.functions[attention.name],
        parameters=parameters[attention.name],
    )


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

    Args:
        loaded: the old model.
        conversion: the class of the new model, and its rank.
        layer_specs: {``encoder`` or ``decoder``: the value of ``--encoder-synthesizer`` for each of its layers}.
        max_length: ``--synth-max-length``.
    """
    settings_of_functions: dict[str, Any] = {"synth_max_length": max_length, "synth_rank": conversion.rank}
    for stack, specs in layer_specs.items():
        flag = f"{stack}_synthesizer"  # encoder_synthesizer or decoder_synthesizer
        settings_of_functions[flag] = join_layer_specs(specs)

    # A flag of the functions has its new value, even if the old model has this flag already.
    settings = {**read_settings(loaded.cfg.model), **settings_of_functions}
    cfg = select_flags_of_class(settings, conversion.model_name, loaded.task)
    cfg["_name"] = conversion.model_name
    return cfg


def select_flags_of_class(settings: dict[str, Any], model_name: str, task: Any) -> dict[str, Any]:
    """Returns {name of a flag: its value} for exactly the flags of a class of models.

    The values come from the settings, or, for a flag that the settings lack, from the defaults of the class.

    Args:
        settings: {name of a flag: its value}, which may have flags that the class lacks.
        model_name: the name under which fairseq knows the class.
        task: the task of the model. The class refuses a task for other kinds of models.
    """
    model_class: Any = MODEL_REGISTRY[model_name]
    cfg = model_class.read_config(argparse.Namespace(**settings), task)
    return dict(vars(cfg))


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
    # This tells users, and `Loaded.build_initial_model`, that the new model was not trained from scratch.
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
