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
from .arguments import KEEP

# {class of a model of fairseq: registered name of this plugin's model that it becomes}
NEW_NAME_OF_STOCK_CLASS: dict[type, str] = {
    TransformerModel: "transformer_synth",
    TransformerLanguageModel: "transformer_lm_synth",
    RobertaModel: "roberta_synth",
}
DEFAULT_FUNCTION = "random"


class Conversion(NamedTuple):
    """Which heads of a model are to be replaced, and what the new model is to be.

    Attributes:
        model_name: the name under which the class of the new model is registered.
        functions: {name of a self-attention: the function that replaces the dot products of its heads}.
        heads: the heads that may be replaced.
        inherited_max_length: ``--synth-max-length`` of the old model, which the new model has to keep; None if the old
            model has none.
        rank: ``--synth-rank`` of the new model.
    """

    model_name: str
    functions: dict[str, str]
    heads: list[Head]
    inherited_max_length: int | None
    rank: int


class Sizes(NamedTuple):
    """The sizes of the new functions.

    Attributes:
        inherited_max_length: ``--synth-max-length``, if the old model has it already; None if `choose_max_length` is to
            choose it after the data are read.
        rank: ``--synth-rank``.
    """

    inherited_max_length: int | None
    rank: int


def plan_conversion(loaded: Loaded, args: argparse.Namespace) -> Conversion:
    """Returns which heads of a model get which function, and at which sizes.

    Args:
        loaded: the model.
        args: the flags of the command line.

    Raises:
        SynthesizerError: the model is of another architecture, or a flag names what it does not have.
    """
    model_name = new_model_name(loaded)
    function_of_stack = choose_functions(loaded, args)
    functions: dict[str, str] = {}
    heads: list[Head] = []
    for attention in choose_attentions(loaded, args.layers):
        new_function = function_of_stack[attention.stack]
        replaceable_heads = dot_product_heads(attention)
        if new_function == KEEP or not replaceable_heads:
            continue
        functions[attention.name] = new_function
        heads += replaceable_heads
    if not heads:
        raise SynthesizerError(
            f"{loaded.path}: no head to replace: the chosen heads compute no dot products, or --encoder {KEEP} or "
            f"--decoder {KEEP} keeps them"
        )
    sizes = choose_sizes(loaded, args)
    return Conversion(
        model_name=model_name,
        functions=functions,
        heads=heads,
        inherited_max_length=sizes.inherited_max_length,
        rank=sizes.rank,
    )


def choose_functions(loaded: Loaded, args: argparse.Namespace) -> dict[str, str]:
    """Returns the function for the heads of each stack, as {``encoder`` or ``decoder``: function}.

    This is the value of the flag ``--encoder`` or ``--decoder``, or `DEFAULT_FUNCTION` without the flag. Both stacks
    have an entry, even if the model lacks one of them.

    Raises:
        SynthesizerError: a flag is given, and the model has no such stack.
    """
    stacks_of_model = find_stacks(loaded.model)
    flags = {"encoder": args.encoder, "decoder": args.decoder}
    functions = {}
    for stack, function in flags.items():
        if function is None:
            functions[stack] = DEFAULT_FUNCTION
        elif stack in stacks_of_model:
            functions[stack] = function
        else:
            raise SynthesizerError(f"--{stack} {function}: the model has no {stack}; remove the flag")
    return functions


def choose_sizes(loaded: Loaded, args: argparse.Namespace) -> Sizes:
    """Returns the sizes of the new functions: those of the command line, or those that the old model has already.

    All functions of a model have the same sizes. So if the old model has other functions than dot products already, the
    new functions get the same sizes, and ``--rank`` has no effect.

    Raises:
        SynthesizerError: ``--max-length`` is given, and the model has synthesizing functions already.
    """
    if not has_synthesizing_functions(loaded):
        # `choose_max_length` reads --max-length later, when the longest sentence of the data is known.
        return Sizes(inherited_max_length=None, rank=args.rank)
    old_max_length = loaded.cfg.model.synth_max_length
    if args.max_length is not None:
        raise SynthesizerError(
            f"--max-length {args.max_length}: this model already has --synth-max-length {old_max_length}, "
            "which holds for all functions of the model; remove the flag"
        )
    return Sizes(inherited_max_length=old_max_length, rank=loaded.cfg.model.synth_rank)


def new_model_name(loaded: Loaded) -> str:
    """Returns the name under which the class of the new model is registered with fairseq.

    A model of fairseq becomes this plugin's model of the same kind, and a model of this plugin keeps its class.

    Raises:
        SynthesizerError: models of this class cannot be converted.
    """
    model_class = type(loaded.model)
    if model_class in NEW_NAME_OF_STOCK_CLASS:
        return NEW_NAME_OF_STOCK_CLASS[model_class]
    for name in NEW_NAME_OF_STOCK_CLASS.values():
        if MODEL_REGISTRY[name] is model_class:  # one of this plugin's classes
            return name
    raise SynthesizerError(
        f"{loaded.path}: a {model_class.__name__} cannot be converted; only fairseq's transformer, transformer_lm "
        "and roberta and this plugin's models can"
    )


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
                f"--layers {name}: cross-attention cannot be replaced, because positions do not say which words "
                "of two sentences belong together; remove this name"
            )
        chosen.append(by_name[name])
    return chosen


def dot_product_heads(attention: Attention) -> list[Head]:
    """Returns the heads of an attention that compute dot products (``vanilla``), alone or in a mixture."""
    all_heads = attention.heads()
    chosen_heads = []
    first_head = 0  # the number of the first head in the group
    for group in attention.head_groups():
        end = first_head + group.num_heads
        if "vanilla" in group.functions:
            chosen_heads += all_heads[first_head:end]
        first_head = end
    return chosen_heads


def has_synthesizing_functions(loaded: Loaded) -> bool:
    """Returns whether some head of the model has a function other than ``vanilla``, the dot product."""
    for attention in self_attentions(loaded.model):
        for group in attention.head_groups():
            if group.functions != ("vanilla",):
                return True
    return False


def choose_max_length(loaded: Loaded, longest_read: int, max_length_flag: int | None) -> int:
    """Returns ``--synth-max-length`` of the new model: the number of tokens in the longest sentence that it takes.

    It is the value of ``--max-length``, or as large as allowed if this flag is not given. Longer sentences than those
    that were read are not allowed, because the attention to later positions is unknown. But if the old model was
    trained on rows of text, all of these rows must be allowed, so that the training can be continued.

    Args:
        loaded: the old model.
        longest_read: number of tokens in the longest sentence over which attention was averaged.
        max_length_flag: the value of ``--max-length``, or None.

    Raises:
        SynthesizerError: ``--max-length`` is larger than allowed.
    """
    least_needed = find_row_length(loaded.cfg)  # 0 if the training reads sentences instead of rows of text
    largest_allowed = max(longest_read, least_needed)
    if max_length_flag is None:
        return largest_allowed
    if max_length_flag > largest_allowed:
        raise SynthesizerError(
            f"--max-length {max_length_flag}: no sentence that was read from {loaded.data} has more than "
            f"{longest_read} tokens, so later positions are unknown; use at most {largest_allowed}, or "
            "relative_random, which accepts any length"
        )
    if max_length_flag < least_needed:
        return least_needed
    return max_length_flag


def find_row_length(cfg: Any) -> int:
    """Returns the number of tokens in the longest row of text that a training may read; 0 if it reads sentences.

    Language models, and encoders such as RoBERTa, read rows of text. Translation models read sentences, and have none
    of the following flags.

    Args:
        cfg: fairseq's config of the training.
    """
    row_length = read_number(cfg.task, "tokens_per_sample")
    if getattr(cfg.model, "add_bos_token", False):
        row_length += 1  # An additional token is at the beginning of each row.
    # An encoder has --max-positions, up to which the rows of a further training may be longer.
    longest_row_of_encoder = read_number(cfg.model, "max_positions")
    return max(row_length, longest_row_of_encoder)


def read_number(options: Any, name: str) -> int:
    """Returns the value of a flag in a part of fairseq's config; 0 if there is no such flag, or if it is not set."""
    value: int | None = getattr(options, name, None)
    if value is None:
        return 0
    return value
