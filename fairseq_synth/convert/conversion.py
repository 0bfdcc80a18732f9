"""Which heads of a model get which function, and what the model allows."""

import argparse
from typing import Any, NamedTuple

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
    """What a model is to become.

    Attributes:
        model_name: the name under which the class of the new model is registered.
        functions: {self-attention: the function that replaces its dot products}.
        heads: the heads that may be replaced.
        fixed_max_length: ``--synth-max-length``, if the model already has functions whose parameters have that size.
            None if it has no such functions: then ``--max-length`` or the data decide.
        rank: ``--synth-rank`` of the new model.
    """

    model_name: str
    functions: dict[str, str]
    heads: list[Head]
    fixed_max_length: int | None
    rank: int


def plan_conversion(loaded: Loaded, args: argparse.Namespace) -> Conversion:
    """Returns what the flags ask for.

    Raises:
        SynthesizerError: the model is of another architecture, or a flag names what it does not have.
    """
    model_name = new_model_name(loaded)
    function_flags = read_function_flags(args)
    check_stacks(loaded, function_flags)
    functions: dict[str, str] = {}
    heads: list[Head] = []
    for attention in choose_attentions(loaded, args.layers):
        function = function_flags[attention.stack] or DEFAULT_FUNCTION
        replaceable = dot_product_heads(attention)
        if function != KEEP and replaceable:
            functions[attention.name] = function
            heads += replaceable
    if not heads:
        raise SynthesizerError(f"{loaded.path}: no head to replace: none of those asked for has dot-product attention")
    fixed_max_length = None
    rank = args.rank
    if has_other_functions(loaded):
        # These functions stay, and all functions of a model share one --synth-max-length and one --synth-rank.
        fixed_max_length = loaded.cfg.model.synth_max_length
        rank = loaded.cfg.model.synth_rank
        if args.max_length is not None:
            raise SynthesizerError(
                f"--max-length {args.max_length}: the model already has functions with --synth-max-length "
                f"{fixed_max_length}, which the new ones share; leave the flag out"
            )
    return Conversion(
        model_name=model_name,
        functions=functions,
        heads=heads,
        fixed_max_length=fixed_max_length,
        rank=rank,
    )


def read_function_flags(args: argparse.Namespace) -> dict[str, str | None]:
    """Returns {stack: the function that its flag, ``--encoder`` or ``--decoder``, names; None if it is not given}."""
    return {"encoder": args.encoder, "decoder": args.decoder}


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


def check_stacks(loaded: Loaded, function_flags: dict[str, str | None]) -> None:
    """Checks that the model has each stack for which a function is given.

    Raises:
        SynthesizerError: it has no such stack.
    """
    stacks_of_model = find_stacks(loaded.model)
    for stack, function in function_flags.items():
        if function is not None and stack not in stacks_of_model:
            raise SynthesizerError(f"--{stack} {function}: the model has no {stack}; leave it out")


def choose_attentions(loaded: Loaded, layers: str | None) -> list[Attention]:
    """Returns the self-attentions that ``--layers`` names; all of them if it is not given.

    Args:
        loaded: the old model.
        layers: names of attentions, joined by commas, or None.

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
    """Returns the heads of an attention that compute dot products (``vanilla``), alone or in a mixture."""
    heads = []
    first_head = 0
    for group in attention.head_groups():
        if "vanilla" in group.functions:
            heads += [Head(attention.name, first_head + i) for i in range(group.num_heads)]
        first_head += group.num_heads
    return heads


def has_other_functions(loaded: Loaded) -> bool:
    """Returns whether a self-attention of the model has a head with a function other than ``vanilla``."""
    for attention in self_attentions(loaded.model):
        for group in attention.head_groups():
            if group.functions != ("vanilla",):
                return True
    return False


def choose_max_length(loaded: Loaded, longest_read: int, max_length_flag: int | None) -> int:
    """Returns ``--synth-max-length`` of the new model: that of the flag, or else the longest sentence that was read.

    It is at least the length of the blocks of text that the training reads, since otherwise the new model could not be
    trained further with the same flags.

    Args:
        loaded: the old model.
        longest_read: tokens of the longest sentence that was read.
        max_length_flag: the flag ``--max-length``.

    Raises:
        SynthesizerError: the flag is larger than what was read.
    """
    block_length = find_block_length(loaded.cfg)
    limit = max(longest_read, block_length)
    if max_length_flag is not None and max_length_flag > limit:
        raise SynthesizerError(
            f"--max-length {max_length_flag}: no sentence of {loaded.data} that was read has more than "
            f"{longest_read} tokens, so nothing is known of positions beyond; give at most {limit}, or "
            "relative_random, which takes any length"
        )
    length = longest_read if max_length_flag is None else max_length_flag
    return max(length, block_length)


def find_block_length(cfg: Any) -> int:
    """Returns the tokens of the longest block of text that a training may read, 0 if it reads sentence by sentence.

    Args:
        cfg: fairseq's config of the training.
    """
    tokens_per_sample = getattr(cfg.task, "tokens_per_sample", None) or 0
    if getattr(cfg.model, "add_bos_token", False):
        tokens_per_sample += 1  # fairseq puts one more token before each block
    max_positions = getattr(cfg.model, "max_positions", None) or 0  # of an encoder
    return max(tokens_per_sample, max_positions)
