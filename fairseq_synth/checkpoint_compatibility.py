"""Checks that a checkpoint fits a synthesized attention, and starts such an attention from a stock Transformer.

A *stock* Transformer is fairseq's own, whose attention computes dot products (``vanilla``). All weights that a
synthesized attention has in addition are in keys ``synthesizer.*`` of its state dict.
"""

import copy
import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from .errors import SynthesizerError
from .synthesizers import LayerSynthesizer, Mixture

logger = logging.getLogger(__name__)

StateDict = dict[str, Tensor]

# A key of a function's weight in a synthesizer's state dict. The group is missing if all heads are one group.
FUNCTION_KEY = re.compile(r"(?:groups\.(?P<group>\d+)\.)?components\.(?P<function>\w+)\.")


class SavedAttention(NamedTuple):
    """What a checkpoint says about the functions of an attention."""

    prefix: str  # All keys of the attention begin with it, such as "encoder.layers.0.self_attn.", with a dot.
    synthesizer: StateDict  # the weights of all functions but ``vanilla``, such as "components.random.R"
    has_queries: bool  # whether there are query and key projections, which are the weights of ``vanilla``

    @property
    def name(self) -> str:
        """Returns the name of the attention, such as "encoder.layers.0.self_attn"."""
        return self.prefix.removesuffix(".")

    def is_stock(self) -> bool:
        """Returns whether the attention computes dot products (``vanilla``) alone, as in a stock Transformer."""
        return self.has_queries and not self.synthesizer


def read_attention(state_dict: StateDict, prefix: str) -> SavedAttention:
    """Returns what a checkpoint says about the attention whose keys begin with `prefix`, which ends with a dot."""
    return SavedAttention(
        prefix=prefix,
        synthesizer=select_prefix(state_dict, f"{prefix}synthesizer."),
        has_queries=f"{prefix}q_proj.weight" in state_dict,
    )


def adapt_checkpoint(
    state_dict: StateDict, prefix: str, synthesizer: LayerSynthesizer, all_layers_are_stock: bool = True
) -> None:
    """Checks that an attention can load its weights from a checkpoint, and adds what a stock checkpoint lacks.

    Args:
        state_dict: The weights of the checkpoint, to which weights may be added in place.
        prefix: The keys of this attention begin with it; it ends with a dot.
        synthesizer: The part of the attention that computes the logits.
        all_layers_are_stock: Whether the checkpoint has dot products (``vanilla``) alone in every attention, and not
            only in this one. `state_dict` may have this attention alone, so that the answer cannot be found in it.

    Raises:
        SynthesizerError: The weights do not fit.
    """
    has_keys_of_this_attention = any(key.startswith(prefix) for key in state_dict)
    if not has_keys_of_this_attention:
        return  # Strict loading, which comes next, lists what is missing.

    saved = read_attention(state_dict, prefix)
    # The weights of a model that is prepared for generation have another meaning. This is checked first: such a model
    # also lacks the weights of mixtures, for which `check_mixture` would give the wrong advice of another mixture.
    check_folding(saved, synthesizer)
    if saved.is_stock():
        # The checkpoint has dot products alone here. The model may mix them with other functions, which get weights.
        check_start(saved.name, synthesizer, all_layers_are_stock)
        for key, value in starting_weights(saved.name, synthesizer).items():
            state_dict[f"{prefix}synthesizer.{key}"] = value
    else:
        # The checkpoint has other functions here, and the model must have the same. If the functions are the same, they
        # must be mixed in the same way. If that is so, too, the weights have the same names and must have one shape.
        check_functions(saved, synthesizer)
        check_mixture(saved, synthesizer)
        check_shapes(saved, synthesizer)


def select_prefix(state_dict: StateDict, prefix: str) -> StateDict:
    """Returns the entries whose keys begin with `prefix`, without the prefix."""
    return {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}


def check_folding(saved: SavedAttention, synthesizer: LayerSynthesizer) -> None:
    """Raises SynthesizerError if only the checkpoint or only the model is *folded*, that is, prepared for generation.

    In a folded model, the weights of mixtures are multiplied into other parameters (`Mixture.fold_weights_`). So the
    same parameters mean something else than in a model that is trained.

    Args:
        saved: The attention in the checkpoint.
        synthesizer: The synthesizer of the model.
    """
    is_saved_folded = is_folded(saved.synthesizer)
    is_model_folded = is_folded(synthesizer.state_dict())
    if is_saved_folded and not is_model_folded:
        raise SynthesizerError(
            f"{saved.name}: these are weights of a model prepared for generation, which no other model can load; use "
            "the checkpoint file of that model"
        )
    if is_model_folded and not is_saved_folded:
        raise SynthesizerError(
            f"{saved.name}: this model is prepared for generation and can no longer load weights; load them into a new "
            "model"
        )


def is_folded(keys: Iterable[str]) -> bool:
    """Returns whether a synthesizer whose state dict has these keys is prepared for generation."""
    return bool(keys_with_name(keys, "folded"))


def keys_with_name(keys: Iterable[str], name: str) -> set[str]:
    """Returns the keys of all parameters or buffers with a name: ``alpha`` or ``groups.0.alpha`` for "alpha"."""
    return {key for key in keys if key.split(".")[-1] == name}


def check_functions(saved: SavedAttention, synthesizer: LayerSynthesizer) -> None:
    """Raises SynthesizerError if the functions of the attention in the checkpoint are not those in the model.

    The functions are known by the names of their weights. The weights of ``vanilla`` are the query and key projections.
    The weights of all other functions are in the state dict of the synthesizer.

    Args:
        saved: The attention in the checkpoint.
        synthesizer: The synthesizer of the model.
    """
    saved_functions = functions_with_weights(saved.synthesizer)
    model_functions = functions_with_weights(synthesizer.state_dict())
    model_has_queries = any(mixture.reads_query_key for mixture in synthesizer.mixtures())
    if saved_functions == model_functions and saved.has_queries == model_has_queries:
        return
    raise SynthesizerError(
        f"{saved.name}: the checkpoint has {describe_weights(saved_functions, saved.has_queries)}, but this model has "
        f"{' and '.join(function_names(synthesizer))}; {advise_functions(saved.name)}"
    )


def check_mixture(saved: SavedAttention, synthesizer: LayerSynthesizer) -> None:
    """Raises SynthesizerError if the attention has another ``--synth-mixture`` in the checkpoint than in the model.

    A mixture of several functions has a parameter ``alpha`` if it is ``convex``, and none if it is ``sum``. For
    example, ``random+vanilla`` has the keys ``alpha`` and ``components.random.R``, or with ``sum`` only the second one.

    Args:
        saved: The attention in the checkpoint. `check_functions` has made sure that it has the functions of the model.
        synthesizer: The synthesizer of the model.
    """
    saved_alphas = keys_with_name(saved.synthesizer, "alpha")
    model_alphas = keys_with_name(synthesizer.state_dict(), "alpha")
    if saved_alphas == model_alphas:
        return
    # The functions are the same. So if the alphas differ, one of the two has them, and the other one has none.
    if saved_alphas:
        mixture_of_checkpoint = "convex"
    else:
        mixture_of_checkpoint = "sum"
    raise SynthesizerError(
        f"{saved.name}: the checkpoint was trained with --synth-mixture {mixture_of_checkpoint}; use the same flag"
    )


def describe_weights(functions: set[str], has_queries: bool) -> str:
    """Returns what a message says about the weights of an attention in a checkpoint.

    Args:
        functions: The names of the functions that have weights in the checkpoint.
        has_queries: Whether the checkpoint has query and key projections in this attention.
    """
    weights = " and ".join(sorted(functions)) if functions else "no function"
    projections = "query and key projections" if has_queries else "no query and key projections"
    return f"weights of {weights}, and {projections}"


def check_shapes(saved: SavedAttention, synthesizer: LayerSynthesizer) -> None:
    """Raises SynthesizerError if a weight has another shape in the checkpoint than in the model."""
    for key, value in synthesizer.state_dict().items():
        saved_value = saved.synthesizer.get(key)
        if saved_value is not None and saved_value.shape != value.shape:
            raise SynthesizerError(
                f"{saved.prefix}synthesizer.{key} is {tuple(saved_value.shape)} in the checkpoint and "
                f"{tuple(value.shape)} in this model; use the --synth-max-length, --synth-rank and attention "
                "heads that the model was trained with"
            )


def check_start(attention: str, synthesizer: LayerSynthesizer, all_layers_are_stock: bool) -> None:
    """Raises SynthesizerError if the attention of the model cannot start from dot products in the checkpoint.

    In the checkpoint, all heads of this attention compute dot products (``vanilla``) and nothing else.

    Args:
        attention: The name of the attention in the model, such as ``encoder.layers.0.self_attn``.
        synthesizer: The synthesizer of the model.
        all_layers_are_stock: Whether all other attentions of the checkpoint compute dot products alone, too.
    """
    mixtures = synthesizer.mixtures()  # one for each group of heads of one kind
    all_heads_have_dot_products = all(mixture.reads_query_key for mixture in mixtures)
    if all_heads_have_dot_products and not has_other_functions(synthesizer):
        return  # This is ``vanilla`` alone, as in the checkpoint, which has all weights.
    if len(mixtures) > 1:
        # For example ``random:4/vanilla:4``.
        raise SynthesizerError(
            f"{attention}: the checkpoint has dot-product attention in all heads, but this model has heads of "
            f"several kinds; {advise_functions(attention)}"
        )
    if not all_heads_have_dot_products:
        # For example ``random``.
        raise SynthesizerError(
            f"{attention}: the checkpoint has dot-product attention in this layer, but this model has "
            f"{' and '.join(function_names(synthesizer))}; {advise_functions(attention)} (only vanilla and mixtures "
            "with it can start from a stock Transformer)"
        )
    # What is left is a mixture such as ``random+vanilla``. It can start from dot products, because ``random`` gets new
    # weights. But if another attention of the checkpoint has functions, too, the checkpoint is of such a model already,
    # and the weights of ``random`` have been lost here. New weights would hide that.
    if not all_layers_are_stock:
        missing = " and ".join(sorted(functions_with_weights(synthesizer.state_dict())))
        raise SynthesizerError(
            f"{attention}: the checkpoint has no weights of {missing} here, but has weights of synthesizing functions "
            f"in other layers; {advise_functions(attention)}, or use a complete checkpoint"
        )


def has_other_functions(synthesizer: LayerSynthesizer) -> bool:
    """Returns whether a synthesizer has other functions than ``vanilla``, because it has weights.

    ``vanilla`` has none there: its weights are the query and key projections, which belong to the attention.
    """
    return bool(synthesizer.state_dict())


def starting_weights(attention: str, synthesizer: LayerSynthesizer) -> StateDict:
    """Returns the weights with which a synthesizer starts from a stock Transformer, in which it adds functions.

    For example, it adds ``random`` to the dot products of the Transformer. The weights of ``random`` are such that its
    logits are 0 and change nothing. There are two exceptions, of which the user is warned (`warn_of_other_output`): a
    function without trained weights keeps its logits, and the weights of a convex mixture reduce the dot products.

    Args:
        attention: The name of the attention in the model, such as ``encoder.layers.0.self_attn``.
        synthesizer: The synthesizer of the model, which is not changed. `check_start` has accepted it.
    """
    if not has_other_functions(synthesizer):
        return {}
    names = " and ".join(function_names(synthesizer))
    logger.info(f"{attention}: starting {names} from the weights of dot-product attention")
    changed_copy = copy.deepcopy(synthesizer)
    for mixture in changed_copy.mixtures():
        warn_of_other_output(attention, mixture)
        for function in mixture.functions():
            function.zero_logits_()  # has no effect on functions without trained weights
    return changed_copy.state_dict()


def warn_of_other_output(attention: str, mixture: Mixture) -> None:
    """Warns if the output of an attention will differ from that of the stock checkpoint it starts from.

    The logits of the checkpoint are those of ``vanilla``, the dot products. The logits of the model are the same if it
    adds only logits of 0 to them. They differ in two cases:

    1. The mixture is convex. Its weights are less than 1, so the logits of ``vanilla`` become smaller.
    2. A function such as ``fixed_random`` adds fixed logits, which training never changes and which are not 0.

    Args:
        attention: The name of the attention in the model, such as ``encoder.layers.0.self_attn``.
        mixture: The functions of its heads, which are all of one kind.
    """
    is_convex = mixture.has_weights()
    if is_convex:  # case 1
        logger.warning(
            f"{attention}: --synth-mixture convex scales down the logits of the checkpoint; use --synth-mixture "
            "sum to start with the checkpoint's output"
        )
    for name, function in zip(mixture.components, mixture.functions()):
        if function.has_fixed_logits():  # case 2
            logger.warning(
                f"{attention}: {name} has fixed logits, so the model starts with a different output than the checkpoint"
            )


def function_names(synthesizer: LayerSynthesizer) -> list[str]:
    """Returns the names of a layer's functions for messages; with several groups of heads, they name the group too."""
    mixtures = synthesizer.mixtures()
    if len(mixtures) == 1:
        return list(mixtures[0].components)
    names = []
    for group, mixture in enumerate(mixtures):
        names += [name_in_group(function, group) for function in mixture.components]
    return names


def functions_with_weights(keys: Iterable[str]) -> set[str]:
    """Returns the functions that have weights in a synthesizer's state dict, named as in `function_names`.

    Args:
        keys: The keys of the state dict. The name of the function is in ``components.random.R``, or in
            ``groups.0.components.random.R`` for the first of several groups of heads. Keys without the name of a
            function, such as ``alpha``, are skipped.
    """
    names = set()
    for key in keys:
        match = FUNCTION_KEY.match(key)
        if match is None:
            continue
        group_text = match["group"]  # such as "0"; None if all heads are one group
        if group_text is None:
            names.add(match["function"])
        else:
            names.add(name_in_group(match["function"], group=int(group_text)))
    return names


def name_in_group(function: str, group: int) -> str:
    """Returns how a message names a function of a group of heads; `group` counts from 0, and the message from 1."""
    return f"{function} (group {group + 1} of the heads)"


def advise_functions(attention: str) -> str:
    """Returns the advice to give the flags of the training.

    Args:
        attention: The name of the attention in the model, such as ``encoder.layers.0.self_attn``.
    """
    side = attention.split(".")[0]
    if side in ("encoder", "decoder"):
        return f"use the --{side}-synthesizer that the model was trained with"
    return "use the --encoder-synthesizer and --decoder-synthesizer that the model was trained with"
