"""The attentions of a model: reading their logits, switching heads off, and other branches of their layers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from torch import Tensor

from ..attention import SyntheticAttention
from ..checkpoint_compatibility import function_names
from ..logits import Logits
from ..masks import causal_mask, masked_softmax
from ..positions import Inputs


class Attention(NamedTuple):
    """One attention of a model."""

    stack: str  # encoder or decoder
    kind: str  # self or cross
    layer: int
    module: Any  # a SyntheticAttention or fairseq's

    @property
    def name(self) -> str:
        return f"{self.stack}.{self.kind}.{self.layer}"

    @property
    def group(self) -> str:
        """The attentions that are compared with each other: encoder.self, decoder.self or decoder.cross."""
        return f"{self.stack}.{self.kind}"

    @property
    def heads(self) -> int:
        return int(self.module.num_heads)

    @property
    def functions(self) -> list[str]:
        """Where its logits come from."""
        return function_names(self.module.synthesizer) if is_synthetic(self.module) else ["vanilla"]

    def alpha(self) -> dict[str, list[float]] | None:
        """{function: its weight in each head, 0 in a head without it}; None where no head has learned weights."""
        mixtures = self.module.synthesizer.mixtures() if is_synthetic(self.module) else []
        if all(mixture.alpha is None for mixture in mixtures):
            return None
        found = {name: [0.0] * self.heads for mixture in mixtures for name in mixture.components}
        first = 0
        for mixture in mixtures:
            weights = mixture.weights()
            for m, name in enumerate(mixture.components):
                own = [1.0] * mixture.num_heads if weights is None else weights[m].tolist()
                found[name][first : first + mixture.num_heads] = own
            first += mixture.num_heads
        return found

    def parameters(self) -> Tensor:
        """All values that the logits are computed from: matrices and biases of the functions, query and key."""
        parts = [getattr(self.module, f"{name}_proj", None) for name in "qk"]
        parts.append(getattr(self.module, "synthesizer", None))
        values = [value for part in parts if part is not None for value in state(part).values()]
        # a function may have none, and torch joins no empty list
        return torch.cat([torch.empty(0), *(value.detach().float().flatten() for value in values)])

    def logits_without_input(self, length: int) -> Tensor | None:
        """The logits (H, T, T) of a function that never looks at the input, else None."""
        if not is_synthetic(self.module) or self.module.q_proj is not None:
            return None
        x = next(self.module.parameters()).new_zeros(length, 2, self.module.embed_dim)
        with torch.no_grad():
            found = logits_of_heads(self.module, self.module.synthesizer(Inputs(x, None, None, 0, length)), length)
        return found[0] if found.size(0) == 1 else None


def is_synthetic(module: nn.Module) -> bool:
    """Whether it is this project's attention, not fairseq's."""
    return isinstance(module, SyntheticAttention)


def state(module: nn.Module) -> dict[str, Tensor]:
    """What the logits depend on: parameters and buffers, without the weights of a mixture."""
    values = [*module.named_parameters(), *module.named_buffers()]
    return {name: value for name, value in values if not name.endswith("alpha")}


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """{encoder or decoder: the module with its layers}: both, or the one that a language model or an encoder has."""
    found: dict[str, nn.Module] = {}
    for module in model.modules():
        for name, cls in (("encoder", TransformerEncoderBase), ("decoder", TransformerDecoderBase)):
            if isinstance(module, cls):
                found.setdefault(name, module)
    return found


def attentions(model: nn.Module) -> list[Attention]:
    """All of a model, group by group; empty if one of its layers has another kind of attention."""
    found = []
    for name, kind in (("encoder", "self"), ("decoder", "self"), ("decoder", "cross")):
        stack = stacks(model).get(name)
        for i, layer in enumerate(stack.layers if stack is not None else ()):  # type: ignore[arg-type]
            module = getattr(layer, "self_attn" if kind == "self" else "encoder_attn", None)
            if module is None and kind == "cross":
                continue
            if not isinstance(module, (SyntheticAttention, MultiheadAttention)):
                return []
            found.append(Attention(name, kind, i, module))
    return found


class Reading(NamedTuple):
    """What one attention has computed for a batch."""

    attention: Attention
    logits: Tensor  # (B, H, T, S), before any mask
    causal: bool


@contextlib.contextmanager
def without_fast_paths(model: nn.Module) -> Iterator[None]:
    """Switches off fairseq's fast paths, which skip hooks: its attention's, and in 0.12.2 its encoder layers'."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name, value in (("skip_embed_dim_check", True), ("can_use_fastpath", False)):
            if name in vars(module):
                changed.append((module, name, getattr(module, name)))
                setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


@contextlib.contextmanager
def hooked(model: nn.Module, handles: Sequence[Any]) -> Iterator[None]:
    """Runs the hooks of `handles`, which fairseq's fast paths would pass by, and removes them at the end."""
    try:
        with without_fast_paths(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def tokens_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields {stack: its tokens in the latest forward pass, (B, T)}."""
    tokens: dict[str, Tensor] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            key = "src_tokens" if name == "encoder" else "prev_output_tokens"
            tokens[name] = args[0] if args else kwargs[key]

        return hook

    handles = [s.register_forward_pre_hook(hook_of(name), with_kwargs=True) for name, s in stacks(model).items()]
    with hooked(model, handles):
        yield tokens


@contextlib.contextmanager
def reading(model: nn.Module, read: Callable[[Reading], None]) -> Iterator[None]:
    """Calls `read` for each attention of a forward pass over whole sentences."""

    def hook_of(attention: Attention) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = dict(zip(("query", "key"), args), **kwargs)
            causal = attention.kind == "self" and call.get("attn_mask") is not None
            read(Reading(attention, logits_of(module, call["query"], call.get("key")), causal))

        return hook

    handles = [a.module.register_forward_hook(hook_of(a), with_kwargs=True) for a in attentions(model)]
    with hooked(model, handles):
        yield


def logits_of_heads(module: Any, groups: list[Logits], src_len: int) -> Tensor:
    """The logits of all groups of heads, (B or 1, H, S, S); B only if a function depends on the input."""
    parts = [(logits.total(src_len), heads) for logits, heads in zip(groups, module.heads_of_groups())]
    bsz = max(part.size(0) for part, _ in parts)
    return torch.cat([part.expand(bsz, heads, src_len, src_len) for part, heads in parts], dim=1)


def logits_of(module: Any, query: Tensor, key: Tensor | None) -> Tensor:
    """The logits (B, H, T, S) of an attention for its inputs (T, B, C) and (S, B, C), before any mask."""
    dim = module.head_dim
    tgt_len, bsz, _ = query.shape

    def split(x: Tensor) -> Tensor:
        return x.reshape(x.size(0), bsz, x.size(2) // dim, dim).permute(1, 2, 0, 3)

    if not is_synthetic(module):
        return split(module.q_proj(query)) @ split(module.k_proj(key)).transpose(-1, -2) * module.scaling
    q, k, _ = module.project(query)
    groups = module.synthesizer(Inputs(query, q, k, 0, tgt_len))
    return logits_of_heads(module, groups, tgt_len).expand(bsz, -1, -1, -1)


@contextlib.contextmanager
def masked_heads(model: nn.Module, masks: dict[str, Tensor]) -> Iterator[None]:
    """Multiplies heads' outputs, as they enter the output projection, by masks.

    Args:
        model: with any attentions of fairseq's or of this project's.
        masks: {attention: (H,), or for a batch of whole sentences (B, H)}; others stay as they are.
    """

    def hook_of(attention: Attention, mask: Tensor) -> Callable[..., tuple[Tensor]]:
        def hook(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            x = args[0]
            by_head = x.reshape(x.size(0), x.size(1), attention.heads, -1) * mask.to(x.dtype).unsqueeze(-1)
            return (by_head.reshape(x.shape),)

        return hook

    handles = []
    for attention in attentions(model):
        mask = masks.get(attention.name)
        if mask is not None:
            handles.append(attention.module.out_proj.register_forward_pre_hook(hook_of(attention, mask)))
    with hooked(model, handles):
        yield


@contextlib.contextmanager
def replaced_heads(model: nn.Module, logits: dict[str, Tensor], heads: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Replaces the logits of heads of self-attention by constants, in forward passes over whole sentences.

    Args:
        model: with any attentions of fairseq's or of this project's, in eval mode; its sentences padded on the right.
        logits: {attention: (H, n, n)}, by position, for sentences of up to n tokens.
        heads: which ones, as (attention, head).
    """

    def hooks_of(attention: Attention, chosen: list[int]) -> tuple[Callable[..., None], Callable[..., tuple[Tensor]]]:
        call: dict[str, Any] = {}

        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call.update(zip(("query", "key", "value", "key_padding_mask"), args), **kwargs)

        def join(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            x, query = args[0].clone(), call["query"]
            length, bsz, dim = query.size(0), query.size(1), attention.module.head_dim
            value = attention.module.v_proj(query).view(length, bsz, -1, dim).permute(1, 2, 0, 3)[:, chosen]
            scores = logits[attention.name][None, chosen, :length, :length].to(x)
            mask = causal_mask(scores) if call.get("attn_mask") is not None else None
            out = masked_softmax(scores, call.get("key_padding_mask"), mask) @ value
            x.view(length, bsz, -1, dim)[:, :, chosen] = out.permute(2, 0, 1, 3)
            return (x,)

        return before, join

    handles = []
    for attention in attentions(model):
        chosen = sorted(head for name, head in heads if name == attention.name)
        if chosen:
            before, join = hooks_of(attention, chosen)
            handles.append(attention.module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(attention.module.out_proj.register_forward_pre_hook(join))
    with hooked(model, handles):
        yield


def zeroed(model: nn.Module, heads: Sequence[tuple[str, int]]) -> dict[str, Tensor]:
    """Masks for `masked_heads` that switch some heads, (attention, head), off."""
    masks = {attention.name: torch.ones(attention.heads) for attention in attentions(model)}
    for name, head in heads:
        masks[name][head] = 0.0
    return {name: mask for name, mask in masks.items() if not bool(mask.all())}


@contextlib.contextmanager
def layer_outputs(
    model: nn.Module, read: Callable[[str, int, Tensor], None], skip: bool = True, feed_forward: bool = True
) -> Iterator[None]:
    """Calls ``read(stack, layer, output (T, B, C))`` for each layer of a forward pass.

    Args:
        skip: False: no skip connections, so that a branch's output stands alone; layer norms stay.
        feed_forward: False: feed-forward layers are left out, and what would enter them goes on.
    """
    handles, patched = [], []

    def hook_of(name: str, i: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            read(name, i, output[0] if isinstance(output, tuple) else output)

        return hook

    def connection_of(branches: int) -> Callable[[Tensor, Tensor], Tensor]:
        calls = 0

        def connection(x: Tensor, residual: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls % branches == 0 and not feed_forward:
                return residual
            return residual + x if skip else x

        return connection

    for name, stack in stacks(model).items():
        for i, layer in enumerate(stack.layers):  # type: ignore[arg-type]
            handles.append(layer.register_forward_hook(hook_of(name, i)))
            # self-attention, cross-attention if any, feed-forward
            layer.residual_connection = connection_of(2 + (getattr(layer, "encoder_attn", None) is not None))
            patched.append(layer)
    try:
        with hooked(model, handles):
            yield
    finally:
        for layer in patched:
            del layer.residual_connection
