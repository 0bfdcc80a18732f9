"""The flags of the Synthesizers and the checks on them, for every kind of model."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import field
from enum import Enum
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II, OmegaConf

from . import synthesizers
from .errors import SynthesizerError
from .heads import HeadGroup, parse_heads
from .lengths import Limit
from .synthesizers import BEYOND_LENGTH, MIXTURES

Flag = tuple[str, Any, Any]  # name, type, and field of a dataclass


def flag(name: str, kind: Any, default: Any, text: str) -> Flag:
    """A flag of the command line, which is a field of the model's config too; `text` is its help."""
    return name, kind, field(default=default, metadata={"help": text})


# of every kind of model
SYNTHESIZER_FLAGS = [
    flag(
        "synth_max_length",
        int,
        256,
        "longest sentence in tokens that the model can read or write, end of sentence included: the size of the "
        "synthesized matrices (l in the paper). Fixed once trained. No limit for vanilla; for relative_random the "
        "largest distance that is told apart",
    ),
    flag(
        "synth_beyond_length",
        ChoiceEnum(BEYOND_LENGTH),
        "refuse",
        "what to do with sentences longer than --synth-max-length: 'refuse' them, or 'tile' the synthesized matrices, "
        "so that position p uses row and column p mod l",
    ),
    flag("synth_rank", int, 8, "rank of the two matrices of factorized_random (k in the paper)"),
    flag(
        "synth_mixture",
        ChoiceEnum(MIXTURES),
        "convex",
        "how functions joined by '+' mix: 'convex' weighs them by learned weights that sum to 1 (the paper's), 'sum' "
        "adds their logits, so that a model can start from a trained stock Transformer",
    ),
]


def stack_flag(side: str) -> Flag:
    """The flag of models with an encoder or with a decoder."""
    return flag(
        f"{side}_synthesizer",
        str,
        "random+vanilla",
        f"what computes the attention logits in the {side}'s self-attention: one of "
        f"{', '.join(synthesizers.SYNTHESIZERS)}, or several joined by '+' (random+vanilla); one for all layers, or "
        "one for each layer separated by commas (random,random,vanilla for three layers); heads of different kinds in "
        "one layer are separated by '/', with their numbers (random:6/vanilla:2 for eight heads)"
        + (". Attention to an encoder is never replaced" if side == "decoder" else ""),
    )


def config_class(name: str, *flags: Flag) -> Any:
    """The dataclass of a model's flags."""
    namespace = {"__module__": __name__, "__doc__": "Every flag of the model, flat."}
    return dataclasses.make_dataclass(name, flags, bases=(FairseqDataclass,), namespace=namespace)


def flatten(cls: type, prefix: str = "") -> list[Flag]:
    """The fields of fairseq's nested config under their command-line names: encoder.embed_dim -> encoder_embed_dim.

    A flat config is the one that both the command line and Hydra fill without losing a key, and that leaves
    only plain values in a checkpoint.
    """
    flat: list[Flag] = []
    for f in dataclasses.fields(cls):
        nested = f.default_factory if f.default is dataclasses.MISSING else f.default
        if f.name == "_name":
            continue
        if f.name in ("encoder", "decoder", "quant_noise"):
            flat += flatten(nested if isinstance(nested, type) else type(nested), f"{f.name}_")
            continue
        name, default, annotation = prefix + f.name, f.default, f.type
        if name in ("decoder_input_dim", "decoder_output_dim"):
            default = II("model.decoder_embed_dim")  # fairseq's say 512 under Hydra, whatever the width
        if f.name == "layers_to_keep":
            annotation = Optional[str]  # noqa: UP045 - fairseq does not know `str | None`; it declares a list and splits a string
        flat.append((name, annotation, field(default=default, metadata=f.metadata)))
    return flat


def to_namespace(cfg: Any, config: type[FairseqDataclass]) -> argparse.Namespace:
    """A model's config with every flag in it and plain values.

    Args:
        cfg: the flat config, as Hydra's DictConfig, a dataclass or a Namespace.
        config: the model's dataclass, whose defaults fill in what the config of an older checkpoint has not.
    """
    known: dict[str, Any] = {}
    if OmegaConf.is_config(cfg):
        container: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
        known, cfg = container, argparse.Namespace(**container)
    args = argparse.Namespace(**{**vars(config.from_namespace(cfg)), **known})
    for name, value in vars(args).items():
        if isinstance(value, str) and value.startswith("${"):  # an interpolation, which only Hydra resolves
            setattr(args, name, getattr(args, value[len("${model.") : -1]) if value.startswith("${model.") else None)
        elif isinstance(value, Enum):
            setattr(args, name, str(value))
    return args


def check_flags(args: argparse.Namespace, *sides: str) -> None:
    """Replaces ``{side}_synthesizer`` of the stacks by their `layer_specs`; SynthesizerError if a flag is invalid."""
    for flag, least in (("synth_max_length", 2), ("synth_rank", 1)):  # 2: a token and the end of the sentence
        if getattr(args, flag) < least:
            raise SynthesizerError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least {least}")
    if getattr(args, "base_layers", 0):
        raise SynthesizerError(f"--base-layers {args.base_layers}: such layers have no attention; leave the flag out")
    for side in sides:
        check_attention(args, side)
        setattr(args, f"{side}_synthesizer", layer_specs(args, side))


def check_attention(args: argparse.Namespace, side: str) -> None:
    """Raises SynthesizerError unless the heads of a stack share its width equally, and for fairseq's xFormers."""
    width, heads = getattr(args, f"{side}_embed_dim"), getattr(args, f"{side}_attention_heads")
    if heads < 1 or width % heads:
        raise SynthesizerError(
            f"--{side}-attention-heads {heads} does not divide --{side}-embed-dim {width}; choose a divisor"
        )
    if getattr(args, f"{side}_xformers_att_config", None):
        raise SynthesizerError(
            f"--{side}-xformers-att-config: is for fairseq's attention, which this model replaces; leave it out"
        )


def layer_specs(args: argparse.Namespace, side: str) -> list[tuple[HeadGroup, ...]]:
    """The functions of the heads of each layer that is to be built, from ``--{side}-synthesizer``.

    Raises SynthesizerError for an unknown function, or another number of layers or heads than the model has.
    """
    flag = f"--{side}-synthesizer"
    spec, layers = getattr(args, f"{side}_synthesizer"), getattr(args, f"{side}_layers")
    specs = [parse_heads(part, getattr(args, f"{side}_attention_heads"), flag) for part in spec.split(",")]
    if len(specs) == 1:
        specs = specs * layers
    if len(specs) != layers:
        raise SynthesizerError(f"{flag} {spec!r} names {len(specs)} layers, --{side}-layers is {layers}")
    return [specs[i] for i in kept_layers(args, side)]


def kept_layers(args: argparse.Namespace, side: str) -> list[int]:
    """The numbers of the layers that are to be built: those of ``--{side}-layers-to-keep``, or all.

    Raises SynthesizerError if the flag names a layer that the model lacks, or one twice.
    """
    layers, kept = getattr(args, f"{side}_layers"), getattr(args, f"{side}_layers_to_keep", None)
    if not kept:
        return list(range(layers))
    numbers = [number.strip() for number in kept.split(",")]
    if not set(numbers) <= {str(i) for i in range(layers)} or len(set(numbers)) < len(numbers):
        raise SynthesizerError(
            f"--{side}-layers-to-keep {kept!r}: give numbers of layers, 0 to {layers - 1}, joined by commas, each once"
        )
    return sorted(map(int, numbers))


def limit_of(args: Any, specs: Sequence[Sequence[HeadGroup]]) -> Limit | None:
    """``--synth-max-length``, if any function of any layer has that limit and longer sentences are to be refused."""
    names = {name for groups in specs for _, functions in groups for name in functions}
    tokens = synthesizers.longest_sentence(names, args.synth_max_length, str(args.synth_beyond_length))
    return None if tokens is None else Limit(tokens, "--synth-max-length")
