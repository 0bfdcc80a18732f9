"""Finds the attentions of a model, and reads their names, functions and logits.

What the rest of this package reads of the plugin's own attention is read here.
"""

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


class Head(NamedTuple):
    """One head of an attention, counted from 0."""

    attention: str
    number: int


class HeadGroup(NamedTuple):
    """Neighbouring heads with the same functions."""

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
        """The name in figures and flags, such as ``encoder.self.0``."""
        return f"{self.stack}.{self.kind}.{self.layer}"

    @property
    def group(self) -> str:
        """The attentions that are compared with each other: encoder.self, decoder.self or decoder.cross."""
        return f"{self.stack}.{self.kind}"

    @property
    def num_heads(self) -> int:
        """The number of heads."""
        return int(self.module.num_heads)

    @property
    def functions(self) -> list[str]:
        """The functions that compute the logits; ``vanilla`` for fairseq's attention."""
        if is_synthetic(self.module):
            return function_names(self.module.synthesizer)
        return ["vanilla"]

    def heads(self) -> list[Head]:
        """Returns all heads of the attention."""
        return [Head(self.name, number) for number in range(self.num_heads)]

    def head_groups(self) -> list[HeadGroup]:
        """Returns the groups of neighbouring heads that have the same functions."""
        if not is_synthetic(self.module):
            return [HeadGroup(("vanilla",), self.num_heads)]
        groups = []
        for mixture in self.module.synthesizer.mixtures():
            groups.append(HeadGroup(tuple(mixture.components), mixture.num_heads))
        return groups

    def alpha(self) -> dict[str, list[float]] | None:
        """Returns the weight alpha of each function in each head.

        Returns:
            {function: a weight for each head, 0 for a head without the function}; None if no head has learned weights.
        """
        if not is_synthetic(self.module):
            return None
        mixtures = self.module.synthesizer.mixtures()
        if all(mixture.weights() is None for mixture in mixtures):
            return None
        alpha: dict[str, list[float]] = {}
        first_head = 0
        for mixture in mixtures:
            weights = mixture.weights()
            heads = slice(first_head, first_head + mixture.num_heads)
            for number, function in enumerate(mixture.components):
                weights_of_heads = alpha.setdefault(function, [0.0] * self.num_heads)
                if weights is None:  # the only function of these heads
                    weights_of_heads[heads] = [1.0] * mixture.num_heads
                else:
                    weights_of_heads[heads] = weights[number].tolist()
            first_head += mixture.num_heads
        return alpha

    def logit_parameters(self) -> Tensor:
        """Returns all values that the logits are computed from, in one row.

        These are the parameters and buffers of the functions, and the query and key projections, without alpha.
        """
        values = [torch.empty(0)]  # a function may have no parameters, and torch joins no empty list
        for part_name in ("q_proj", "k_proj", "synthesizer"):
            part = getattr(self.module, part_name, None)
            if part is None:
                continue
            for name, value in [*part.named_parameters(), *part.named_buffers()]:
                if "alpha" not in name.split("."):
                    values.append(value.detach().float().flatten())
        return torch.cat(values)

    @torch.no_grad()
    def logits_without_input(self, length: int) -> Tensor | None:
        """Returns the logits (H, T, T) for T tokens if no function looks at the input, else None."""
        if not is_synthetic(self.module) or self.module.q_proj is not None:
            return None
        # Logits that depend on the input have a matrix for each sentence of a batch, other logits have one for all.
        two_sentences = next(self.module.parameters()).new_zeros(length, 2, self.module.embed_dim)
        logits = join_logits(self.module, Inputs(two_sentences, None, None, 0, length))
        depends_on_input = logits.size(0) > 1
        if depends_on_input:
            return None
        return logits[0]


def is_synthetic(module: nn.Module) -> bool:
    """Returns whether a module is this plugin's attention."""
    return isinstance(module, SyntheticAttention)


def find_stacks(model: nn.Module) -> dict[str, Any]:
    """Returns {``encoder`` or ``decoder``: the module with its layers} for the stacks that a model has."""
    stacks: dict[str, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, TransformerEncoderBase):
            stacks.setdefault("encoder", module)
        if isinstance(module, TransformerDecoderBase):
            stacks.setdefault("decoder", module)
    return stacks


def attentions(model: nn.Module) -> list[Attention]:
    """Returns all attentions of a model, group by group; none if a layer has an attention of another kind."""
    stacks = find_stacks(model)
    result = []
    for stack_name, kind in (("encoder", "self"), ("decoder", "self"), ("decoder", "cross")):
        if stack_name not in stacks:
            continue
        for number, layer in enumerate(stacks[stack_name].layers):
            module = getattr(layer, "self_attn" if kind == "self" else "encoder_attn", None)
            if module is None and kind == "cross":
                continue  # a language model's decoder
            if not isinstance(module, (SyntheticAttention, MultiheadAttention)):
                return []
            result.append(Attention(stack_name, kind, number, module))
    return result


def self_attentions(model: nn.Module) -> list[Attention]:
    """Returns the self-attentions of a model."""
    return [attention for attention in attentions(model) if attention.kind == "self"]


def compute_logits(module: Any, query: Tensor, key: Tensor | None) -> Tensor:
    """Returns the logits (B, H, T, S) of an attention before any mask.

    Args:
        module: the attention, this plugin's or fairseq's.
        query: (T, B, C).
        key: (S, B, C); None for self-attention.
    """
    if not is_synthetic(module):
        q = split_heads(module.q_proj(query), module.head_dim)
        k = split_heads(module.k_proj(key), module.head_dim)
        return q @ k.transpose(-1, -2) * module.scaling
    length, bsz, _ = query.shape
    q, k, _ = module.project(query)
    logits = join_logits(module, Inputs(query, q, k, 0, length))
    return logits.expand(bsz, -1, -1, -1)


def join_logits(module: SyntheticAttention, inputs: Inputs) -> Tensor:
    """Returns the logits of all groups of heads, (B or 1, H, S, S); B only if a function depends on the input."""
    length = inputs.src_len
    groups = []
    for logits, num_heads in zip(module.synthesizer(inputs), module.heads_of_groups()):
        groups.append((logits.total(length), num_heads))
    bsz = max(logits.size(0) for logits, _ in groups)
    return torch.cat([logits.expand(bsz, num_heads, length, length) for logits, num_heads in groups], dim=1)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Returns (T, B, C) as (B, H, T, head_dim)."""
    length, bsz, embed_dim = x.shape
    return x.reshape(length, bsz, embed_dim // head_dim, head_dim).permute(1, 2, 0, 3)


def attention_weights(logits: Tensor, causal: bool, key_padding_mask: Tensor | None = None) -> Tensor:
    """Returns the softmax (B, H, T, S) of logits of this size.

    Args:
        logits: (B or 1, H, T, S).
        causal: whether row i sees no column after i.
        key_padding_mask: (B, S), true at padding.
    """
    mask = causal_mask(logits) if causal else None
    return masked_softmax(logits, key_padding_mask, mask)
