"""Context managers that read or change what happens in the forward passes of a model."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from .attentions import Attention, Head, attention_weights, attentions, compute_logits, find_stacks, split_heads

# The first arguments of an attention's forward method, in their order.
ATTENTION_ARGUMENTS = ("query", "key", "value", "key_padding_mask")

# {attribute of a module of fairseq: the value with which the module does not take its fast path}
VALUES_WITHOUT_FAST_PATH = {
    "skip_embed_dim_check": True,  # an attribute of an attention
    "can_use_fastpath": False,  # an attribute of an encoder layer in fairseq 0.12.2
}


class AttentionReading(NamedTuple):
    """What one attention has computed for a batch."""

    attention: Attention
    logits: Tensor  # (B, H, T, S), before any mask
    causal: bool  # whether row i sees no column after i


class LayerOutput(NamedTuple):
    """What one layer has computed for a batch."""

    stack: str  # encoder or decoder
    layer: int
    x: Tensor  # (T, B, C)


# ---- hooks in general


@contextlib.contextmanager
def without_fast_paths(model: nn.Module) -> Iterator[None]:
    """Is a context manager: in its body, the fast paths of fairseq are switched off, because they call no hooks.

    To do so, it changes the attributes in `VALUES_WITHOUT_FAST_PATH` of those modules that have them.
    """
    changed: list[tuple[nn.Module, str, Any]] = []  # a module, an attribute, and the value that it had
    for module in model.modules():
        attributes = vars(module)  # those that the module has itself, and not its class
        for name, value_without_fast_path in VALUES_WITHOUT_FAST_PATH.items():
            if name in attributes:
                changed.append((module, name, attributes[name]))
                setattr(module, name, value_without_fast_path)
    try:
        yield
    finally:
        for module, name, earlier_value in changed:
            setattr(module, name, earlier_value)


@contextlib.contextmanager
def temporary_hooks(model: nn.Module, handles: Sequence[Any]) -> Iterator[None]:
    """Is a context manager: in its body, hooks of a model are called; at its end, they are removed.

    fairseq's fast paths, which call no hooks, are switched off in the body.

    Args:
        model: the model, whose hooks have been registered before.
        handles: the handles that torch returned when they were registered.
    """
    try:
        with without_fast_paths(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


def name_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} of the arguments with which the forward function of an attention was called."""
    positional_arguments = dict(zip(ATTENTION_ARGUMENTS, args))
    return {**positional_arguments, **kwargs}


# ---- logits


@contextlib.contextmanager
def reading_logits(model: nn.Module, on_logits: Callable[[AttentionReading], None]) -> Iterator[None]:
    """Is a context manager: in its body, `on_logits` gets the logits of all attentions in each forward pass.

    Args:
        model: with attentions of fairseq or of this plugin; its forward passes are over whole sentences.
        on_logits: is called with the logits of each attention, as soon as the attention has been called.
    """
    handles = []
    for attention in attentions(model):
        hook = make_logits_hook(attention, on_logits)
        handles.append(attention.module.register_forward_hook(hook, with_kwargs=True))
    with temporary_hooks(model, handles):  # This removes the hooks at the end.
        yield


def make_logits_hook(attention: Attention, on_logits: Callable[[AttentionReading], None]) -> Callable[..., None]:
    """Returns a forward hook, which torch calls after each call of an attention.

    The hook computes the logits of the attention again, and hands them on.

    Args:
        attention: the attention for which the hook is made.
        on_logits: the function that gets the logits.
    """

    def hand_on_logits(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Is called with the attention's module, the arguments of the call, and the output of the module."""
        arguments = name_arguments(args, kwargs)
        # fairseq passes a mask to self-attention if row i may not see the columns after i, and for no other reason.
        has_mask = arguments.get("attn_mask") is not None
        causal = attention.kind == "self" and has_mask
        logits = compute_logits(module, query=arguments["query"], key=arguments.get("key"))
        on_logits(AttentionReading(attention, logits, causal))

    return hand_on_logits


# ---- heads


@contextlib.contextmanager
def scaled_heads(model: nn.Module, factors: dict[str, Tensor]) -> Iterator[None]:
    """Is a context manager: in its body, the outputs of heads are multiplied by factors in all forward passes.

    The outputs are the weighted sums of the values. They are the input of the output projection, so the hooks change
    this input.

    Args:
        model: with attentions of fairseq or of this plugin.
        factors: {attention: a factor for each head, (H,), or for each sentence and head, (B, H)}. Attentions without
            factors stay as they are.
    """
    handles = []
    for attention in attentions(model):
        if attention.name in factors:
            hook = make_scaling_hook(factors[attention.name])
            handles.append(attention.module.out_proj.register_forward_pre_hook(hook))
    with temporary_hooks(model, handles):  # This removes the hooks at the end.
        yield


def make_scaling_hook(factors: Tensor) -> Callable[..., tuple[Tensor]]:
    """Returns a hook that torch calls before each call of an output projection.

    The hook multiplies the input of the projection, which are the outputs of the heads, by factors.

    Args:
        factors: a factor for each head, (H,), or for each sentence and head, (B, H).
    """

    def scale_input(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        """Is called with the projection and its input, and returns the input that it gets instead."""
        (x,) = args  # (T, B, C)
        length, bsz, _ = x.shape
        num_heads = factors.size(-1)
        outputs_of_heads = x.reshape(length, bsz, num_heads, -1)  # (T, B, H, C / H)
        # All tokens, and all dimensions of a head, are multiplied by the same factor.
        scaled = outputs_of_heads * factors.to(x.dtype).unsqueeze(-1)  # by (H, 1) or (B, H, 1)
        return (scaled.reshape(x.shape),)

    return scale_input


def removed_heads(model: nn.Module, heads: Sequence[Head]) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager: in its body, the outputs of some heads are 0 in all forward passes.

    Args:
        model: with attentions of fairseq or of this plugin.
        heads: the heads whose outputs are 0.
    """
    factors: dict[str, Tensor] = {}  # {attention: the factor by which the output of each head is multiplied}
    for attention in attentions(model):
        removed_numbers = [head.number for head in heads if head.attention == attention.name]
        if removed_numbers:
            factors_of_heads = torch.ones(attention.num_heads)
            factors_of_heads[removed_numbers] = 0.0
            factors[attention.name] = factors_of_heads
    return scaled_heads(model, factors)


class HeadReplacement:
    """Replaces the logits of some heads of one self-attention by constant logits, which are the same for any input."""

    def __init__(self, attention: Attention, head_numbers: list[int], logits: Tensor) -> None:
        """Stores what the hooks need.

        Args:
            attention: a self-attention.
            head_numbers: the heads that get other logits.
            logits: (H, n, n), of all heads, for sentences of up to n tokens.
        """
        self.attention = attention
        self.head_numbers = head_numbers
        self.logits = logits
        self.arguments: dict[str, Any] = {}  # the arguments that the attention was called with the last time

    def register_hooks(self) -> list[Any]:
        """Registers the two hooks that replace the heads, and returns the handles by which they can be removed.

        1. Before the attention is called, `keep_arguments` keeps the arguments of the call.
        2. The attention computes the outputs of all heads, which are the input of its output projection. Before this
           projection is called, `replace_outputs` computes other outputs of the chosen heads from the kept arguments.
        """
        module = self.attention.module
        return [
            module.register_forward_pre_hook(self.keep_arguments, with_kwargs=True),
            module.out_proj.register_forward_pre_hook(self.replace_outputs),
        ]

    def keep_arguments(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the arguments of a call of the attention."""
        self.arguments = name_arguments(args, kwargs)

    def replace_outputs(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Returns the input of the output projection with new outputs of the chosen heads."""
        x = args[0].clone()  # (T, B, C), the outputs of all heads side by side
        length, bsz, embed_dim = x.shape
        head_dim = self.attention.module.head_dim
        x_by_head = x.view(length, bsz, embed_dim // head_dim, head_dim)
        x_by_head[:, :, self.head_numbers] = self.compute_outputs()  # This changes x, too, because it is a view of x.
        return (x,)

    def compute_outputs(self) -> Tensor:
        """Returns the outputs (T, B, chosen heads, head_dim) that the chosen heads have with the constant logits."""
        query = self.arguments["query"]  # (T, B, C), which is also the key and the value of self-attention
        length = query.size(0)
        module = self.attention.module
        values_of_all_heads = split_heads(module.v_proj(query), module.head_dim)  # (B, H, T, head_dim)
        values = values_of_all_heads[:, self.head_numbers]
        logits = self.logits[None, self.head_numbers, :length, :length].to(query)  # (1, chosen heads, T, T)
        causal = self.arguments.get("attn_mask") is not None
        weights = attention_weights(logits, causal, self.arguments.get("key_padding_mask"))
        outputs = weights @ values  # (B, chosen heads, T, head_dim)
        return outputs.permute(2, 0, 1, 3)


@contextlib.contextmanager
def replaced_heads(model: nn.Module, logits: dict[str, Tensor], heads: Sequence[Head]) -> Iterator[None]:
    """Is a context manager: in its body, some heads of self-attention have constant logits.

    Args:
        model: with attentions of fairseq or of this plugin, in eval mode. Its forward passes are over whole sentences,
            which are padded on the right.
        logits: {self-attention: the logits of its heads by position, (H, n, n), for sentences of up to n tokens}.
        heads: the heads that get these logits; the others compute their own.
    """
    handles = []
    for attention in attentions(model):
        head_numbers = sorted(head.number for head in heads if head.attention == attention.name)
        if head_numbers:
            replacement = HeadReplacement(attention, head_numbers, logits[attention.name])
            handles += replacement.register_hooks()
    with temporary_hooks(model, handles):  # This removes the hooks at the end.
        yield


# ---- layers


class ResidualConnection:
    """Takes the place of the method ``residual_connection`` of a layer, and can leave out parts of the layer.

    A layer of fairseq has two or three branches: self-attention, cross-attention in a decoder, and the feed-forward
    layer. After each branch, it calls this method, which adds the input of the branch to its output (the skip
    connection). The feed-forward layer always comes last. So the number of calls tells whether it is the turn of the
    feed-forward layer.

    Args:
        num_branches: how many branches the layer has.
        keep_skip: False leaves out the skip connections.
        keep_feed_forward: False leaves out the feed-forward layer.
    """

    def __init__(self, num_branches: int, keep_skip: bool, keep_feed_forward: bool) -> None:
        self.num_branches = num_branches
        self.keep_skip = keep_skip
        self.keep_feed_forward = keep_feed_forward
        self.num_calls = 0

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Returns the input of the next branch: ``residual + x``, or one of the two if the other one is left out.

        Args:
            x: the output of the branch.
            residual: the input of the branch.
        """
        self.num_calls += 1
        is_feed_forward = self.num_calls % self.num_branches == 0
        if is_feed_forward and not self.keep_feed_forward:
            return residual  # The input is passed on, also without skip connections. Otherwise nothing would be left.
        if not self.keep_skip:
            return x
        return residual + x


def count_branches(layer: nn.Module) -> int:
    """Returns the number of branches of a layer: self-attention, cross-attention if it has any, feed-forward layer."""
    has_cross_attention = getattr(layer, "encoder_attn", None) is not None
    return 3 if has_cross_attention else 2


@contextlib.contextmanager
def chosen_branches(model: nn.Module, keep_skip: bool, keep_feed_forward: bool) -> Iterator[None]:
    """Is a context manager: in its body, forward passes leave out the skip connections or feed-forward layers.

    In the body, each layer has a `ResidualConnection` in place of its method ``residual_connection``. If both flags are
    True, the model computes the same as before.

    Args:
        model: a Transformer of fairseq.
        keep_skip: False leaves out the skip connections of all layers; the layer norms stay.
        keep_feed_forward: False leaves out the feed-forward layers: their input is passed on as their output.
    """
    layers = list_layers(model)
    for layer in layers:
        # This attribute of the object hides the method of its class.
        layer.residual_connection = ResidualConnection(count_branches(layer), keep_skip, keep_feed_forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.residual_connection  # The method of the class is visible again.


def list_layers(model: nn.Module) -> list[Any]:
    """Returns all layers of a Transformer: those of its encoder and then those of its decoder, if it has both."""
    layers: list[Any] = []
    for stack in find_stacks(model).values():
        layers += stack.layers
    return layers


@contextlib.contextmanager
def layer_outputs(
    model: nn.Module, on_output: Callable[[LayerOutput], None], keep_skip: bool, keep_feed_forward: bool
) -> Iterator[None]:
    """Is a context manager: in its body, `on_output` gets the outputs of all layers in each forward pass.

    The layers can also be run without their skip connections or their feed-forward layers.

    Args:
        model: a Transformer of fairseq.
        on_output: is called with the output of each layer, as soon as it is computed.
        keep_skip: False leaves the skip connections out; see `chosen_branches`.
        keep_feed_forward: False leaves the feed-forward layers out.
    """
    handles = []
    for stack_name, stack in find_stacks(model).items():
        for layer_number, layer in enumerate(stack.layers):
            hook = make_output_hook(stack_name, layer_number, on_output)
            handles.append(layer.register_forward_hook(hook))
    # The second context manager removes the hooks at the end.
    with chosen_branches(model, keep_skip, keep_feed_forward), temporary_hooks(model, handles):
        yield


def make_output_hook(
    stack_name: str, layer_number: int, on_output: Callable[[LayerOutput], None]
) -> Callable[..., None]:
    """Returns a forward hook, which torch calls after each call of a layer. It hands the output of the layer on.

    Args:
        stack_name: ``encoder`` or ``decoder``.
        layer_number: the number of the layer, from 0.
        on_output: the function that gets the output.
    """

    def hand_on_output(module: Any, args: Any, output: Any) -> None:
        """Is called with the layer, the arguments of the call, and what the layer has returned."""
        # A decoder layer returns a tuple: x, attention weights, and more. Some encoder layers return a tuple, too.
        x = output[0] if isinstance(output, tuple) else output  # (T, B, C)
        on_output(LayerOutput(stack_name, layer_number, x))

    return hand_on_output
