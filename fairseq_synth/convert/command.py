"""Converts a trained Transformer to a Synthesizer, and reports what this changes."""

import argparse
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from ..errors import SynthesizerError
from ..inspect.attentions import Head, attentions, find_stacks, self_attentions
from ..inspect.checkpoints import Batch, Loaded, batches, import_user_dir, load, readable
from ..inspect.passes import loss
from ..inspect.words import (
    Averages,
    average,
    function_logits,
    function_parameters,
    losses_with_single_heads_replaced,
    replace_cheapest_heads_first,
)
from .conversion import Conversion, choose_max_length, plan_conversion
from .model import build_model, save_checkpoint
from .tuning import tuning_command


class FittedFunctions(NamedTuple):
    """The new functions, which come as near to the attention of the old model as they can.

    Attributes:
        parameters: {name of a self-attention: {name of a parameter: its value for all heads}}.
        max_length: ``--synth-max-length`` of the new model.
    """

    parameters: dict[str, dict[str, Tensor]]
    max_length: int


def run(args: argparse.Namespace) -> None:
    """Converts the checkpoint of the command line, writes the new model, and prints what the conversion has changed.

    Args:
        args: the flags, as `arguments.parse` returns them.

    Raises:
        SynthesizerError: a flag, the checkpoint or the data cannot be used; nothing is written.
    """
    loaded = load_separable(args)
    conversion = plan_conversion(loaded, args)
    fitted = fit_functions(loaded, conversion, args)

    # Both losses are computed on the same sentences, those that the new model can read too.
    sentences = readable(loaded, "valid", args.sentences, longest=fitted.max_length)
    valid_batches = batches(loaded, "valid", sentences)
    loss_before = loss(loaded, valid_batches)

    if args.heads_within is None:
        heads = conversion.heads
    else:
        logits = compute_logits(conversion, fitted)
        heads = choose_cheap_heads(
            loaded, valid_batches, logits, conversion.heads, loss_before=loss_before, allowed_increase=args.heads_within
        )
    converted = build_model(loaded, conversion, fitted.parameters, heads, fitted.max_length)
    loss_after = loss(loaded._replace(model=converted.model), valid_batches)
    cfg = save_checkpoint(args.checkpoint, args.out, converted)

    print(f"loss: {loss_before:.4f} bits on {len(sentences):,} sentences of valid ({args.checkpoint})")
    print(f"loss, converted: {loss_after:.4f} bits, {loss_after - loss_before:+.4f} ({args.out})")
    print(f"heads: {describe_heads(loaded, conversion, heads)}")
    print(f"parameters: {count_parameters(loaded.model):,} before, {count_parameters(converted.model):,} after")
    print(f"to tune it: {tuning_command(args.data, args.out, cfg)}")


def fit_functions(loaded: Loaded, conversion: Conversion, args: argparse.Namespace) -> FittedFunctions:
    """Computes the parameters of the new functions from the attention of the old model on data.

    First the attention weights of each head are averaged by position, over many sentences. Then each new function gets
    the parameters with which its attention weights come nearest to these averages.

    Args:
        loaded: the old model.
        conversion: the new function of each self-attention.
        args: the flags of the command line.
    """
    averages = average_attention(loaded, conversion, args)
    max_length = conversion.inherited_max_length
    if max_length is None:  # The old model has no --synth-max-length.
        max_length = choose_max_length(loaded, longest_read=averages.length, max_length_flag=args.max_length)
    parameters = {}
    for attention_name, function in conversion.functions.items():
        constants = averages.constants[attention_name]  # logits whose softmax comes nearest to the averages
        parameters[attention_name] = function_parameters(function, constants, max_length, conversion.rank)
    return FittedFunctions(parameters=parameters, max_length=max_length)


def average_attention(loaded: Loaded, conversion: Conversion, args: argparse.Namespace) -> Averages:
    """Returns the attention of the old model, averaged by position over sentences of ``--subset``.

    Sentences that are longer than the new model will accept are left out, if this limit is known already.

    Args:
        loaded: the old model.
        conversion: has the limit if the new model inherits it from the old model.
        args: the flags of the command line. If the limit is not inherited, ``--max-length`` may set it.
    """
    longest = conversion.inherited_max_length
    if longest is None:
        longest = args.max_length  # None if the flag is not given
    return average(loaded, args.subset, args.sentences, longest=longest)


def compute_logits(conversion: Conversion, fitted: FittedFunctions) -> dict[str, Tensor]:
    """Returns the logits (H, n, n) of the new functions, as {name of a self-attention: logits}; n is `max_length`."""
    logits = {}
    for name, function in conversion.functions.items():
        logits[name] = function_logits(function, fitted.parameters[name], fitted.max_length)
    return logits


def load_separable(args: argparse.Namespace) -> Loaded:
    """Loads the checkpoint of the command line, and checks that its weights can be divided into heads.

    Raises:
        SynthesizerError: it is a TorchScript file, its weights are quantised, or `load` refuses its kind of model.
    """
    import_user_dir(args)
    path = args.checkpoint
    if is_torchscript(path):
        raise SynthesizerError(describe_inseparable(path, "a TorchScript file"))
    loaded = load(path, args.data)
    for attention in attentions(loaded.model):
        # Quantisation puts another class in the place of all projections. Some attentions lack q_proj and k_proj, so
        # only the other two are looked at.
        for projection in (attention.module.v_proj, attention.module.out_proj):
            is_quantised = type(projection) is not nn.Linear
            if is_quantised:
                raise SynthesizerError(describe_inseparable(path, "quantised"))
    return loaded


def is_torchscript(path: Path) -> bool:
    """Returns whether a file is a TorchScript archive."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("constants.pkl") for name in archive.namelist())


def describe_inseparable(path: Path, kind: str) -> str:
    """Returns the error message about a checkpoint in which no head can be chosen, such as ``a TorchScript file``."""
    return (
        f"{path}: its heads cannot be converted separately, because it is {kind}; give the checkpoint that "
        "fairseq-train wrote"
    )


def choose_cheap_heads(
    loaded: Loaded,
    sample: list[Batch],
    logits: dict[str, Tensor],
    heads: list[Head],
    loss_before: float,
    allowed_increase: float,
) -> list[Head]:
    """Returns the heads to replace, so that the loss grows by at most the allowed number of bits.

    The heads are replaced one after the other, until the loss has grown by more. Heads that alone increase the loss
    least come first.

    Args:
        loaded: the old model.
        sample: the batches on which the loss is computed.
        logits: {name of a self-attention: logits (H, n, n) of its new function}.
        heads: the heads to choose from.
        loss_before: the loss of the old model, in bits.
        allowed_increase: how much the loss may grow, in bits.

    Raises:
        SynthesizerError: the loss grows by more if only the cheapest head is replaced.
    """
    # {head: the loss if it alone is replaced}
    loss_if_alone = losses_with_single_heads_replaced(loaded, sample, logits, heads)
    largest_allowed_loss = loss_before + allowed_increase
    chosen_heads = []
    # Each head comes with the loss if it and all heads before it are replaced.
    for head, loss_so_far in replace_cheapest_heads_first(loaded, sample, logits, loss_if_alone):
        if loss_so_far > largest_allowed_loss:
            break
        chosen_heads.append(head)
    if not chosen_heads:
        lowest_cost = min(loss_if_alone.values()) - loss_before
        raise SynthesizerError(
            f"--heads-within {allowed_increase}: every head increases the loss by at least {lowest_cost:.2g} bits; use "
            "a larger number, or remove the flag"
        )
    return chosen_heads


def describe_heads(loaded: Loaded, conversion: Conversion, heads: Sequence[Head]) -> str:
    """Returns how many heads of encoder and decoder are replaced, and by which functions."""
    return ", ".join(describe_stack(stack, loaded, conversion, heads) for stack in find_stacks(loaded.model))


def describe_stack(stack: str, loaded: Loaded, conversion: Conversion, heads: Sequence[Head]) -> str:
    """Returns how many heads of a stack are replaced, such as ``3 of the encoder's 8 are random``.

    Args:
        stack: ``encoder`` or ``decoder``.
        loaded: the old model.
        conversion: the new function of each self-attention.
        heads: the heads that are replaced.
    """
    attentions_of_stack = [attention for attention in self_attentions(loaded.model) if attention.stack == stack]
    names = [attention.name for attention in attentions_of_stack]
    num_heads = sum(attention.num_heads for attention in attentions_of_stack)
    new_functions = [conversion.functions[name] for name in names if name in conversion.functions]
    if not new_functions:
        return f"0 of the {stack}'s {num_heads} are converted"
    new_function = new_functions[0]  # All attentions of a stack that get a new function get the same one.
    num_replaced = len([head for head in heads if head.attention in names])
    return f"{num_replaced} of the {stack}'s {num_heads} are {new_function}"


def count_parameters(model: nn.Module) -> int:
    """Returns the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
