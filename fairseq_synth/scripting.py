"""TorchScript: what `torch.jit.script` takes an attention for, in the place of itself.

It computes the weights as they are defined, and decodes with a cache that is concatenated and reordered, as fairseq's
own. Stacks and models give copies of themselves that share all weights, as torch replaces modules in place.
"""

import copy
from typing import Any

import torch
import torch.nn as nn
from fairseq.incremental_decoding_utils import with_incremental_state
from torch import Tensor

from .cache import append_padding, reorder
from .computations.plain import attention_weights, drop
from .masks import as_boolean, behind_sentences
from .positions import Inputs

State = dict[str, dict[str, Tensor | None]]


class Scriptable:
    """A module with attentions in it; among the bases of a class it stands before `nn.Module`."""

    is_copy = False

    def __prepare_scriptable__(self) -> Any:
        if self.is_copy:
            return self
        shared = [*self.parameters(), *self.buffers()]  # type: ignore[attr-defined]
        found = copy.deepcopy(self, {id(x): x for x in shared})
        for module in found.modules():  # type: ignore[attr-defined]
            if isinstance(module, Scriptable):
                module.is_copy = True
        return found


@with_incremental_state
class ScriptableAttention(nn.Module):
    """A `SyntheticAttention` of the same weights."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.out_proj, self.synthesizer = attention.out_proj, attention.synthesizer
        self.dropout_module = attention.dropout_module
        self.heads, self.head_dim = attention.heads, attention.head_dim
        self.train(attention.training)
        # torch knows what it has replaced by its address, which nothing else may take
        self.replaced = (attention,)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: State | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As that of `SyntheticAttention`."""
        attn_mask, padding = as_boolean(attn_mask), behind_sentences(key_padding_mask, attn_mask)
        q: Tensor | None = None
        k: Tensor | None = None
        if self.q_proj is not None and self.k_proj is not None:
            q, k = self.split_heads(self.q_proj(query)), self.split_heads(self.k_proj(query))
        v = self.split_heads(self.v_proj(query))
        if incremental_state is not None:
            cache = self._get_input_buffer(incremental_state)
            before, keys = cache.get("prev_value"), cache.get("prev_key")
            if before is not None:
                previous, start = cache.get("prev_key_padding_mask"), before.size(2)
                padding = append_padding(previous, padding, query.size(1), start, query.size(0))
                v = torch.cat([before, v], dim=2)
                if k is not None and keys is not None:
                    k = torch.cat([keys, k], dim=2)
            cache = {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding}
            self._set_input_buffer(incremental_state, cache)
        tgt_len, src_len = query.size(0), v.size(2)
        parts: list[Tensor] = []
        groups = self.synthesizer(Inputs(query, q, k, src_len - tgt_len, src_len))
        for logits, heads in zip(groups, self.heads):
            weights = attention_weights(logits, heads, tgt_len, src_len, padding, attn_mask, bsz=query.size(1))
            parts.append(weights.to(v.dtype))
        weights = torch.cat(parts, dim=1)
        module = self.dropout_module
        dropout = module.p if self.training or module.apply_during_inference else 0.0
        out = torch.matmul(drop(weights, dropout, query.size(1)), v)
        out = self.out_proj(out.permute(2, 0, 1, 3).reshape(query.size()))
        if not need_weights and not need_head_weights:
            return out, None
        return out, weights.transpose(0, 1) if need_head_weights else weights.mean(dim=1)

    def split_heads(self, x: Tensor) -> Tensor:
        """(T, B, C) -> (B, H, T, d_h)."""
        return x.view(x.size(0), x.size(1), x.size(2) // self.head_dim, self.head_dim).permute(1, 2, 0, 3)

    @torch.jit.export
    def reorder_incremental_state(self, incremental_state: State, new_order: Tensor) -> State:
        """Reorders the cache to the hypotheses that the beam search goes on with."""
        cache = self._get_input_buffer(incremental_state)
        if len(cache) > 0:
            self._set_input_buffer(incremental_state, reorder(cache, new_order))
        return incremental_state

    def _get_input_buffer(self, incremental_state: State | None) -> dict[str, Tensor | None]:
        cache = self.get_incremental_state(incremental_state, "attn_state")  # type: ignore[operator]
        if cache is not None:
            return cache
        empty: dict[str, Tensor | None] = {}
        return empty

    def _set_input_buffer(self, incremental_state: State, buffer: dict[str, Tensor | None]) -> State | None:
        return self.set_incremental_state(incremental_state, "attn_state", buffer)  # type: ignore[operator]
