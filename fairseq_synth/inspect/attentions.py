"""Finds the attentions of a model, and reads their names, functions and logits.

This is the only file of the package that reads the inside of the plugin's own attention.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from torch import Tensor

from ..attention import SyntheticAttention
from ..checkpoint_compatibility import function_names
from ..masks import causal_mask, masked_softmax
from ..positions import Inputs

ATTENTION_OF_KIND = {"self": "self_attn", "cross": "encoder_attn"}  # {kind: fairseq's name for it in a layer}


class Head(NamedTuple):
    """One head: the name of its attention, such as ``encoder.self.0``, and its number there, from 0."""

    attention: str
    number: int


class HeadGroup(NamedTuple):
    """Neighbouring heads of an attention whose logits are computed by the same functions."""

    functions: tuple[str, ...]
    num_heads: int


class Attention(NamedTuple):
    """One attention of a model."""

    stack: str  # encoder or decoder
    kind: str  # self or cross
    layer: int
    module: Any  # a SyntheticAttention or fairseq's MultiheadAttention

    @property
    def name(self) -> str:
        """The name in results and flags, such as ``encoder.self.0``."""
        return f"{self.stack}.{self.kind}.{self.layer}"

    @property
    def group(self) -> str:
        """The kind of attention, over all layers: ``encoder.self``, ``decoder.self`` or ``decoder.cross``."""
        return f"{self.stack}.{self.kind}"

    @property
    def num_heads(self) -> int:
        """The number of heads."""
        return int(self.module.num_heads)

    @property
    def functions(self) -> list[str]:
        """The names of the functions that compute the logits; ``vanilla`` for fairseq's attention."""
        if is_synthetic(self.module):
            return function_names(self.module.synthesizer)
        return ["vanilla"]

    def heads(self) -> list[Head]:
        """Returns all heads of the attention."""
        return [Head(self.name, number) for number in range(self.num_heads)]

    def head_groups(self) -> list[HeadGroup]:
        """Returns the heads of the attention in groups: neighbouring heads with the same functions."""
        if not is_synthetic(self.module):
            return [HeadGroup(functions=("vanilla",), num_heads=self.num_heads)]
        groups = []
        for mixture in self.module.synthesizer.mixtures():
            groups.append(HeadGroup(functions=tuple(mixture.components), num_heads=mixture.num_heads))
        return groups

    def alpha(self) -> dict[str, list[float]] | None:
        """Returns {function: its weight alpha in each head}; None if the attention learns no such weights.

        A mixture adds the logits of several functions, each multiplied by a learned weight alpha. Groups of heads may
        have different functions; see `join_alpha`.
        """
        if not is_synthetic(self.module):
            return None
        mixtures = self.module.synthesizer.mixtures()  # one for each group of heads
        has_learned_weights = any(mixture.weights() is not None for mixture in mixtures)
        if not has_learned_weights:
            return None
        return join_alpha(mixtures, self.num_heads)

    def logit_parameters(self) -> Tensor:
        """Returns all trained values that the logits are computed from, as one vector.

        They are the weights of the query and key projections, and the parameters and buffers of the functions. The
        weights alpha of a mixture are left out, because they have a result of their own (`alpha`).
        """
        values = []
        for part_name in ("q_proj", "k_proj", "synthesizer"):
            part = getattr(self.module, part_name, None)
            if part is None:
                continue
            for name, value in [*part.named_parameters(), *part.named_buffers()]:
                is_alpha = "alpha" in name.split(".")  # such as "alpha" or "groups.0.alpha"
                if not is_alpha:
                    values.append(value.detach().float().flatten())
        if not values:
            return torch.empty(0)
        return torch.cat(values)

    @torch.no_grad()
    def logits_without_input(self, length: int) -> Tensor | None:
        """Returns the logits (H, T, T) of all sentences of T = `length` tokens, or None if they depend on the words."""
        if not is_synthetic(self.module):
            return None  # The logits of fairseq's attention are dot products of the words.
        has_dot_products = self.module.q_proj is not None
        if has_dot_products:
            return None
        # The logits of two sentences show whether a function reads the words: then each sentence has logits of its own.
        # Otherwise there is one set of logits for all sentences.
        logits = compute_logits_of_zeros(self.module, num_sentences=2, length=length)  # (2 or 1, H, T, T)
        reads_words = logits.size(0) == 2
        if reads_words:
            return None
        return logits[0]


def join_alpha(mixtures: Sequence[Any], num_heads: int) -> dict[str, list[float]]:
    """Returns the weight that each function has in each head of an attention.

    For example, heads 0 and 1 have a mixture of ``random`` and ``dense``, and heads 2 and 3 have ``random`` alone. The
    result could be {"random": [0.3, 0.6, 1.0, 1.0], "dense": [0.7, 0.4, 0.0, 0.0]}.

    Args:
        mixtures: a `Mixture` of this plugin for each group of neighbouring heads, in the order of the heads.
        num_heads: the number of heads of all groups together.
    """
    alpha: dict[str, list[float]] = {}
    first_head = 0  # the number of the first head in the group
    for mixture in mixtures:
        end = first_head + mixture.num_heads
        for function, weights_of_group in weights_by_function(mixture).items():
            if function not in alpha:
                alpha[function] = [0.0] * num_heads
            alpha[function][first_head:end] = weights_of_group
        first_head = end
    return alpha


def weights_by_function(mixture: Any) -> dict[str, list[float]]:
    """Returns the weights of a mixture of functions for a group of heads.

    Args:
        mixture: a `Mixture` of this plugin.

    Returns:
        {function: its weight in each head of the group}. A function that is alone has the weight 1.
    """
    weights = mixture.weights()  # (functions, heads of the group); None for a function that is alone
    if weights is None:
        return {function: [1.0] * mixture.num_heads for function in mixture.components}
    return {function: weights[number].tolist() for number, function in enumerate(mixture.components)}


def is_synthetic(module: nn.Module) -> bool:
    """Returns whether a module is this plugin's attention."""
    return isinstance(module, SyntheticAttention)


def find_stacks(model: nn.Module) -> dict[str, Any]:
    """Returns {``encoder`` or ``decoder``: the module that has its layers}, for the stacks that a model has."""
    stacks: dict[str, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, TransformerEncoderBase):
            stacks.setdefault("encoder", module)
        if isinstance(module, TransformerDecoderBase):
            stacks.setdefault("decoder", module)
    return stacks


def attentions(model: nn.Module) -> list[Attention]:
    """Returns all attentions of a model: self-attentions of the encoder and of the decoder, and cross-attentions.

    Each kind is listed layer by layer. The list is empty if any attention is neither fairseq's nor this plugin's,
    because such a model cannot be inspected.
    """
    stacks = find_stacks(model)
    all_attentions = [
        *list_attentions(stacks, "encoder", "self"),
        *list_attentions(stacks, "decoder", "self"),
        *list_attentions(stacks, "decoder", "cross"),
    ]
    for attention in all_attentions:
        is_known = isinstance(attention.module, (SyntheticAttention, MultiheadAttention))
        if not is_known:
            return []
    return all_attentions


def list_attentions(stacks: dict[str, Any], stack: str, kind: str) -> list[Attention]:
    """Returns the attentions of one kind in one stack, layer by layer, whatever their class is.

    The list is empty if the model has no such stack. A decoder without an encoder has no cross-attentions.

    Args:
        stacks: {``encoder`` or ``decoder``: the module that has its layers}, as `find_stacks` returns it.
        stack: ``encoder`` or ``decoder``.
        kind: ``self`` or ``cross``.
    """
    if stack not in stacks:
        return []
    attentions_of_layers = []
    for layer_number, layer in enumerate(stacks[stack].layers):
        module = getattr(layer, ATTENTION_OF_KIND[kind], None)
        is_without_cross_attention = kind == "cross" and module is None
        if not is_without_cross_attention:
            attentions_of_layers.append(Attention(stack=stack, kind=kind, layer=layer_number, module=module))
    return attentions_of_layers


def self_attentions(model: nn.Module) -> list[Attention]:
    """Returns the self-attentions of a model, the encoder's first."""
    return [attention for attention in attentions(model) if attention.kind == "self"]


def compute_logits(module: Any, query: Tensor, key: Tensor | None) -> Tensor:
    """Returns the logits (B, H, T, S) that an attention computes in a call, before a mask is added.

    Args:
        module: fairseq's attention, or this plugin's, which is for self-attention only.
        query: the argument of the call, (T, B, C).
        key: the argument of the call, (S, B, C). This plugin's attention does not read it, so it may be None there.
    """
    if is_synthetic(module):
        return compute_synthetic_logits(module, query)
    assert key is not None
    return compute_dot_products(module, query, key)


def compute_synthetic_logits(module: SyntheticAttention, x: Tensor) -> Tensor:
    """Returns the logits (B, H, T, T) that this plugin's attention computes for whole sentences x (T, B, C)."""
    length, bsz, _ = x.shape
    projections = module.project(x)
    logits = join_logits(module, Inputs(x=x, q=projections.q, k=projections.k, start=0, src_len=length))
    return logits.expand(bsz, -1, -1, -1)


def compute_dot_products(module: MultiheadAttention, query: Tensor, key: Tensor) -> Tensor:
    """Returns the scaled dot products (B, H, T, S) of fairseq's attention, of query (T, B, C) and key (S, B, C)."""
    q = split_heads(module.q_proj(query), module.head_dim)
    k = split_heads(module.k_proj(key), module.head_dim)
    return q @ k.transpose(-1, -2) * module.scaling


def compute_logits_of_zeros(module: SyntheticAttention, num_sentences: int, length: int) -> Tensor:
    """Returns the logits that this plugin's attention computes if all words of the sentences are vectors of zeros.

    Args:
        module: this plugin's attention, without queries and keys.
        num_sentences: B.
        length: T, the number of tokens of each sentence.

    Returns:
        (B, H, T, T) if a function reads the words, otherwise (1, H, T, T), which are the logits of all sentences.
    """
    any_parameter = next(module.parameters())  # has the type and the device of the module
    zeros = any_parameter.new_zeros(length, num_sentences, module.embed_dim)  # (T, B, C), the order of fairseq
    whole_sentences = Inputs(x=zeros, q=None, k=None, start=0, src_len=length)
    return join_logits(module, whole_sentences)


def join_logits(module: SyntheticAttention, inputs: Inputs) -> Tensor:
    """Returns the logits of all heads of this plugin's attention in one tensor.

    The attention computes them in groups of neighbouring heads.

    Args:
        module: this plugin's attention. The heads of a group have the same functions.
        inputs: whole sentences of S tokens, with the queries and keys if a function needs them.

    Returns:
        (B, H, S, S), or (1, H, S, S) if no function depends on the input.
    """
    length = inputs.src_len
    logits_of_groups = [logits.total(length) for logits in module.synthesizer(inputs)]
    # A group may have one matrix for all sentences, or one for all of its heads. All groups are expanded to the same
    # number of sentences, and each to its number of heads, so that torch can join them.
    bsz = max(logits.size(0) for logits in logits_of_groups)
    expanded = []
    for logits, num_heads in zip(logits_of_groups, module.heads_of_groups()):
        expanded.append(logits.expand(bsz, num_heads, length, length))
    return torch.cat(expanded, dim=1)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Returns the features (T, B, C) of all heads as (B, H, T, head_dim)."""
    length, bsz, embed_dim = x.shape
    num_heads = embed_dim // head_dim
    return x.reshape(length, bsz, num_heads, head_dim).permute(1, 2, 0, 3)


def attention_weights(logits: Tensor, causal: bool, key_padding_mask: Tensor | None = None) -> Tensor:
    """Returns the attention weights (B, H, T, S): the softmax of the logits over the columns that each row may see.

    Args:
        logits: (B or 1, H, T, S).
        causal: True if row i sees no column after i.
        key_padding_mask: (B, S), True at padding, which no row sees.
    """
    mask = causal_mask(logits) if causal else None
    return masked_softmax(logits, key_padding_mask, mask)
