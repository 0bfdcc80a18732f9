"""Context managers that read or change what happens in a model's forward passes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from .attentions import Attention, Head, attention_weights, attentions, compute_logits, find_stacks, split_heads

ATTENTION_ARGUMENTS = ("query", "key", "value", "key_padding_mask")  # in the order of a call


class Reading(NamedTuple):
    """What one attention has computed for a batch."""

    attention: Attention
    logits: Tensor  # (B, H, T, S), before any mask
    causal: bool


class LayerOutput(NamedTuple):
    """What one layer has computed for a batch."""

    stack: str
    layer: int
    x: Tensor  # (T, B, C)


@contextlib.contextmanager
def without_fast_paths(model: nn.Module) -> Iterator[None]:
    """Switches off fairseq's fast paths, which skip hooks: its attention's, and in 0.12.2 its encoder layers'."""
    saved: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name, value in (("skip_embed_dim_check", True), ("can_use_fastpath", False)):
            if name in vars(module):
                saved.append((module, name, getattr(module, name)))
                setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


@contextlib.contextmanager
def hooked(model: nn.Module, handles: Sequence[Any]) -> Iterator[None]:
    """Keeps hooks in place for the body, without the fast paths that would skip them, and removes them at the end."""
    try:
        with without_fast_paths(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def input_tokens(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields {stack: its input tokens (B, T)}, which each forward pass fills."""
    tokens: dict[str, Tensor] = {}

    def make_hook(stack_name: str) -> Callable[..., None]:
        argument = "src_tokens" if stack_name == "encoder" else "prev_output_tokens"

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tokens[stack_name] = args[0] if args else kwargs[argument]

        return hook

    handles = []
    for name, stack in find_stacks(model).items():
        handles.append(stack.register_forward_pre_hook(make_hook(name), with_kwargs=True))
    with hooked(model, handles):
        yield tokens


@contextlib.contextmanager
def reading(model: nn.Module, read: Callable[[Reading], None]) -> Iterator[None]:
    """Calls `read` for each attention of a forward pass over whole sentences."""

    def make_hook(attention: Attention) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = {**dict(zip(ATTENTION_ARGUMENTS, args)), **kwargs}
            causal = attention.kind == "self" and call.get("attn_mask") is not None
            logits = compute_logits(module, call["query"], call.get("key"))
            read(Reading(attention, logits, causal))

        return hook

    handles = []
    for attention in attentions(model):
        handles.append(attention.module.register_forward_hook(make_hook(attention), with_kwargs=True))
    with hooked(model, handles):
        yield


@contextlib.contextmanager
def masked_heads(model: nn.Module, masks: dict[str, Tensor]) -> Iterator[None]:
    """Multiplies the outputs of heads, as they enter the output projection, by masks.

    Args:
        model: with attentions of fairseq or of this plugin.
        masks: {attention: (H,), or for a batch of whole sentences (B, H)}; other attentions stay as they are.
    """

    def make_hook(attention: Attention, mask: Tensor) -> Callable[..., tuple[Tensor]]:
        def hook(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            x = args[0]  # (T, B, C)
            by_head = x.reshape(x.size(0), x.size(1), attention.num_heads, -1)
            masked = by_head * mask.to(x.dtype).unsqueeze(-1)
            return (masked.reshape(x.shape),)

        return hook

    handles = []
    for attention in attentions(model):
        if attention.name in masks:
            hook = make_hook(attention, masks[attention.name])
            handles.append(attention.module.out_proj.register_forward_pre_hook(hook))
    with hooked(model, handles):
        yield


def removed_heads(model: nn.Module, heads: Sequence[Head]) -> contextlib.AbstractContextManager[None]:
    """Removes heads from forward passes: their outputs become 0."""
    masks: dict[str, Tensor] = {}
    for attention in attentions(model):
        numbers = [head.number for head in heads if head.attention == attention.name]
        if numbers:
            mask = torch.ones(attention.num_heads)
            mask[numbers] = 0.0
            masks[attention.name] = mask
    return masked_heads(model, masks)


class HeadReplacement:
    """Two hooks that give some heads of a self-attention constant logits, whatever its input is."""

    def __init__(self, attention: Attention, numbers: list[int], logits: Tensor) -> None:
        """Takes the heads' numbers, and logits (H, n, n) for sentences of up to n tokens."""
        self.attention = attention
        self.numbers = numbers
        self.logits = logits
        self.call: dict[str, Any] = {}

    def remember_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the arguments of the attention's call; a hook before the attention."""
        self.call = {**dict(zip(ATTENTION_ARGUMENTS, args)), **kwargs}

    def replace_outputs(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Returns the input of the output projection with other outputs of the heads; a hook before the projection."""
        x = args[0].clone()  # (T, B, C)
        query = self.call["query"]  # (T, B, C)
        length, bsz, embed_dim = query.shape
        head_dim = self.attention.module.head_dim
        values = split_heads(self.attention.module.v_proj(query), head_dim)[:, self.numbers]
        logits = self.logits[None, self.numbers, :length, :length].to(x)
        causal = self.call.get("attn_mask") is not None
        weights = attention_weights(logits, causal, self.call.get("key_padding_mask"))
        outputs = (weights @ values).permute(2, 0, 1, 3)  # (T, B, replaced heads, head_dim)
        x_by_head = x.view(length, bsz, embed_dim // head_dim, head_dim)
        x_by_head[:, :, self.numbers] = outputs  # changes x, of which this is a view
        return (x,)


@contextlib.contextmanager
def replaced_heads(model: nn.Module, logits: dict[str, Tensor], heads: Sequence[Head]) -> Iterator[None]:
    """Replaces the logits of heads of self-attention by constants, in forward passes over whole sentences.

    Args:
        model: with attentions of fairseq or of this plugin, in eval mode; its sentences are padded on the right.
        logits: {attention: (H, n, n)}, by position, for sentences of up to n tokens.
        heads: the heads to replace.
    """
    handles = []
    for attention in attentions(model):
        numbers = sorted(head.number for head in heads if head.attention == attention.name)
        if numbers:
            replacement = HeadReplacement(attention, numbers, logits[attention.name])
            module = attention.module
            handles.append(module.register_forward_pre_hook(replacement.remember_call, with_kwargs=True))
            handles.append(module.out_proj.register_forward_pre_hook(replacement.replace_outputs))
    with hooked(model, handles):
        yield


def make_connection(num_branches: int, skip: bool, feed_forward: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function to stand for a layer's ``residual_connection``.

    Each branch of the layer calls it once in a forward pass, in the same order, so a count of the calls tells which
    branch is calling.

    Args:
        num_branches: the branches of the layer; the feed-forward layer is the last.
        skip: False leaves the skip connections out.
        feed_forward: False leaves the feed-forward layer out.
    """
    num_calls = 0

    def connection(x: Tensor, residual: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        is_feed_forward = num_calls % num_branches == 0
        if is_feed_forward and not feed_forward:
            return residual
        if skip:
            return residual + x
        return x

    return connection


@contextlib.contextmanager
def layer_outputs(
    model: nn.Module, read: Callable[[LayerOutput], None], skip: bool, feed_forward: bool
) -> Iterator[None]:
    """Calls `read` for each layer of a forward pass.

    Args:
        skip: False leaves the skip connections out, so that a branch's output stands alone; layer norms stay.
        feed_forward: False leaves the feed-forward layers out: what would enter them goes on.
    """

    def make_hook(stack_name: str, number: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            x = output[0] if isinstance(output, tuple) else output
            read(LayerOutput(stack_name, number, x))

        return hook

    handles = []
    patched_layers = []
    for name, stack in find_stacks(model).items():
        for number, layer in enumerate(stack.layers):
            handles.append(layer.register_forward_hook(make_hook(name, number)))
            has_cross_attention = getattr(layer, "encoder_attn", None) is not None
            num_branches = 3 if has_cross_attention else 2  # self-attention, cross-attention, feed-forward layer
            layer.residual_connection = make_connection(num_branches, skip, feed_forward)
            patched_layers.append(layer)
    try:
        with hooked(model, handles):
            yield
    finally:
        for layer in patched_layers:
            del layer.residual_connection
