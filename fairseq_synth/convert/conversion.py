"""Which heads of a model get which function, and what the model allows."""

import argparse
from typing import NamedTuple

from fairseq.models import MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel

from ..errors import SynthesizerError
from ..inspect.attentions import Attention, Head, attentions, find_stacks, self_attentions
from ..inspect.checkpoints import Loaded
from ..inspect.words import FUNCTIONS

STOCK_MODELS: dict[type, str] = {  # fairseq's models, and the plugin's models that they become
    TransformerModel: "transformer_synth",
    TransformerLanguageModel: "transformer_lm_synth",
    RobertaModel: "roberta_synth",
}
KEEP = "vanilla"  # the function of a stack that stays as it is
CHOICES = (*FUNCTIONS, KEEP)
DEFAULT_FUNCTION = "random"
STACKS = ("encoder", "decoder")


class Conversion(NamedTuple):
    """What a model is to become."""

    model_name: str  # of the new model, as registered
    functions: dict[str, str]  # {self-attention: the function that replaces its dot products}
    heads: list[Head]  # that may be replaced
    max_length: int | None  # of position-based functions that the model already has; None: it has none
    rank: int


def plan_conversion(loaded: Loaded, args: argparse.Namespace) -> Conversion:
    """Returns what the flags ask for.

    Raises:
        SynthesizerError: the model is of another architecture, or a flag names what it does not have.
    """
    model_name = new_model_name(loaded)
    check_stacks(loaded, args)
    functions: dict[str, str] = {}
    heads: list[Head] = []
    for attention in choose_attentions(loaded, args.layers):
        function = getattr(args, attention.stack) or DEFAULT_FUNCTION
        replaceable = dot_product_heads(attention)
        if function != KEEP and replaceable:
            functions[attention.name] = function
            heads += replaceable
    if not heads:
        raise SynthesizerError(f"{loaded.path}: no head to replace: none of those asked for has dot-product attention")
    cfg = loaded.cfg.model
    if not has_other_functions(loaded):
        return Conversion(model_name, functions, heads, max_length=None, rank=args.rank)
    if args.max_length:
        raise SynthesizerError(f"--max-length: the model has functions that keep its {cfg.synth_max_length}")
    return Conversion(model_name, functions, heads, max_length=cfg.synth_max_length, rank=cfg.synth_rank)


def new_model_name(loaded: Loaded) -> str:
    """Returns the registered name of the new model.

    Raises:
        SynthesizerError: models of this class cannot be converted.
    """
    model_class = type(loaded.model)
    if model_class in STOCK_MODELS:
        return STOCK_MODELS[model_class]
    for name in STOCK_MODELS.values():
        if MODEL_REGISTRY[name] is model_class:
            return name
    raise SynthesizerError(
        f"{loaded.path}: its model, {model_class.__name__}, cannot be converted; fairseq's transformer, transformer_lm "
        "and roberta and this plugin's models can"
    )


def check_stacks(loaded: Loaded, args: argparse.Namespace) -> None:
    """Checks that the model has the stacks that flags are given for.

    Raises:
        SynthesizerError: it has no such stack.
    """
    for stack in STACKS:
        function = getattr(args, stack)
        if function is not None and stack not in find_stacks(loaded.model):
            raise SynthesizerError(f"--{stack} {function}: the model has no {stack}; leave it out")


def choose_attentions(loaded: Loaded, layers: str | None) -> list[Attention]:
    """Returns the self-attentions that ``--layers`` names; all of them if it is not given.

    Raises:
        SynthesizerError: there is no such attention, or it is a cross-attention.
    """
    if not layers:
        return self_attentions(loaded.model)
    by_name = {attention.name: attention for attention in attentions(loaded.model)}
    chosen = []
    for name in layers.split(","):
        if name not in by_name:
            raise SynthesizerError(f"--layers {name}: no such attention; the model has {', '.join(by_name)}")
        if by_name[name].kind == "cross":
            raise SynthesizerError(
                f"--layers {name}: cross-attention is never replaced, as positions alone do not say which words "
                "of two sentences belong together; leave it out"
            )
        chosen.append(by_name[name])
    return chosen


def dot_product_heads(attention: Attention) -> list[Head]:
    """Returns the heads of an attention that have ``vanilla``, alone or in a mixture."""
    heads = []
    first_head = 0
    for group in attention.head_groups():
        if "vanilla" in group.functions:
            heads += [Head(attention.name, first_head + i) for i in range(group.num_heads)]
        first_head += group.num_heads
    return heads


def has_other_functions(loaded: Loaded) -> bool:
    """Returns whether a self-attention of the model has functions other than ``vanilla``, whose sizes are set."""
    for attention in self_attentions(loaded.model):
        for group in attention.head_groups():
            if group.functions != ("vanilla",):
                return True
    return False


def choose_max_length(loaded: Loaded, longest_read: int, asked: int | None) -> int:
    """Returns ``--synth-max-length`` of the new model: as asked for, or as long as the data and the task's blocks.

    Args:
        longest_read: tokens of the longest sentence that was read.
        asked: the flag ``--max-length``.

    Raises:
        SynthesizerError: more is asked for than was read.
    """
    cfg = loaded.cfg
    block_length = getattr(cfg.task, "tokens_per_sample", None) or 0
    if getattr(cfg.model, "add_bos_token", False):
        block_length += 1
    block_length = max(block_length, getattr(cfg.model, "max_positions", None) or 0)
    limit = max(longest_read, block_length)
    if asked is not None and asked > limit:
        raise SynthesizerError(
            f"--max-length {asked}: no sentence of {loaded.data} that was read has more than {longest_read} tokens, so "
            f"nothing is known of positions beyond; give at most {limit}, or relative_random, which takes any length"
        )
    return max(asked or longest_read, block_length)
