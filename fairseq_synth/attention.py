"""Self-attention over synthesized logits, in the place of fairseq's MultiheadAttention.

The projections are here. `synthesizers` computes the logits, `computations` the softmax with its masks and dropout, and
`cache` stores what decoding needs of earlier tokens.
"""

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor

from . import cache
from .computations import attend
from .computations.plain import attention_weights, drop, weighted_sum
from .linear import is_plain_linear, joined
from .logits import Logits
from .masks import as_boolean, behind_sentences, is_causal, is_recorded
from .positions import Inputs
from .scripting import ScriptableAttention
from .state import prepare
from .synthesizers import LayerSynthesizer


@with_incremental_state
class SyntheticAttention(nn.Module):
    """Multi-head self-attention ``softmax(S(X)) G(X)`` with S of a `LayerSynthesizer`, mostly a `Mixture` (eq. 3).

    For ``vanilla`` the state dict is that of fairseq's MultiheadAttention, key by key and, from the same
    seed, bit by bit. Any other function adds ``synthesizer.*``; without ``vanilla`` there is no q_proj
    and no k_proj. `make_generation_fast_` changes weights for good, and marks the state dict.

    Args:
        embed_dim: width C of the layer; a multiple of `num_heads`.
        num_heads: H.
        synthesizer: what computes the logits, built for the same heads of the same width.
        dropout: probability of dropping an attention weight.
        q_noise: quantization noise on the projections, and its block size `qn_block_size`.

    Raises:
        ValueError: embed_dim is no multiple of num_heads, or the synthesizer is built for other heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        synthesizer: LayerSynthesizer,
        dropout: float = 0.0,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        # fairseq's name, by which --retain-dropout-modules finds it
        self.dropout_module = FairseqDropout(dropout, module_name="MultiheadAttention")

        def projection(width: int = embed_dim) -> nn.Module:
            return quant_noise(nn.Linear(embed_dim, width), q_noise, qn_block_size)

        mixtures = synthesizer.mixtures()
        self.heads = [mixture.num_heads for mixture in mixtures]  # of each group
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        widths = {mixture.head_dim for mixture in mixtures}
        if sum(self.heads) != num_heads or widths != {self.head_dim}:
            raise ValueError(
                f"the synthesizer has {sum(self.heads)} heads of width {', '.join(map(str, sorted(widths)))}, and the "
                f"attention has {num_heads} of width {self.head_dim}: give both the same num_heads and head_dim"
            )
        self.num_query_key_heads = sum(mixture.num_heads for mixture in mixtures if mixture.reads_query_key)
        width = self.num_query_key_heads * self.head_dim
        # created and initialized in fairseq's order: one seed, the same weights
        self.k_proj = projection(width) if width else None
        self.v_proj = projection()
        self.q_proj = projection(width) if width else None
        self.out_proj = projection()
        self.synthesizer = synthesizer
        self.own_table = self.shared_table = self._get_full_incremental_state_key("table")  # type: ignore[operator]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """fairseq's initialization of the projections, then the synthesizer's own."""
        for proj in (self.k_proj, self.v_proj, self.q_proj):
            if proj is not None:
                nn.init.xavier_uniform_(proj.weight, gain=1 / math.sqrt(2))  # type: ignore[arg-type]
        nn.init.xavier_uniform_(self.out_proj.weight)  # type: ignore[arg-type]
        nn.init.constant_(self.out_proj.bias, 0.0)  # type: ignore[arg-type]
        self.synthesizer.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends; the call is fairseq's.

        Args:
            query: (T, B, C), positions 0..T-1 of the sentence, or the newest token with a cache.
            key, value: the same tensor as `query`, or None: this is self-attention.
            key_padding_mask: (B, T), true at padding, of this call's tokens.
            incremental_state: the decoder's cache; this module keeps its values (and its keys, where something
                reads them) in it, and their places and the padding mask in a table that layers may share.
            need_weights: also return the attention weights, averaged over the heads.
            attn_mask: (T, S), boolean with true for hidden, or floating point to add to the logits; or `causal_mask`,
                the fast way to say causal.
            need_head_weights: return them for each head.

        Returns:
            the output (T, B, C), and the weights: (B, T, S), (H, B, T, S) or None. A row that may see no
            key at all has output ``out_proj(0)`` and weights 0; a sentence of padding alone has any finite
            output where the weights are not asked for.
        """
        if key is not query or value is not query:
            check_self_attention(query, key=key, value=value)
        attn_mask, key_padding_mask = as_boolean(attn_mask), behind_sentences(key_padding_mask, attn_mask)
        q, k, v = self.project(query)
        if incremental_state is not None:
            out, weights = self.step(query, q, k, v, key_padding_mask, incremental_state, attn_mask)
        else:
            length, bsz = query.size(0), query.size(1)
            groups = self.synthesizer(Inputs(query, q, k, 0, length))
            if not need_weights and not need_head_weights:
                return self.output(groups, v, key_padding_mask, attn_mask), None
            weights = self.weights_of(groups, length, length, key_padding_mask, attn_mask, -1).to(v.dtype)
            out = weighted_sum(drop(weights, self.dropout(), bsz), v)
        out = self.out_proj(out.permute(2, 0, 1, 3).reshape(query.size()))
        if not need_weights and not need_head_weights:
            return out, None
        weights = weights.expand(query.size(1), -1, -1, -1)
        return out, weights.transpose(0, 1) if need_head_weights else weights.mean(dim=1)

    def output(
        self, groups: list[Logits], v: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor:
        """The output (T, B, C) by the fastest computation, which has no weights to return."""
        if len(groups) == 1:  # without a slice, whose gradient is a copy
            out = attend(groups[0], v, key_padding_mask, attn_mask, self.dropout())
        else:
            calls = zip(groups, v.split(self.heads, dim=1))
            out = torch.cat([attend(*x, key_padding_mask, attn_mask, self.dropout()) for x in calls], dim=-1)
        size, out_proj = (v.size(2), v.size(0), self.embed_dim), self._modules["out_proj"]  # type: Any, Any
        if is_plain_linear(out_proj):  # of two dimensions, which takes less time
            return F.linear(out, out_proj.weight, out_proj.bias).view(size)
        return out_proj(out.view(size))

    def step(
        self,
        query: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None,
        incremental_state: dict[str, dict[str, Tensor | None]],
        attn_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The newest tokens in decoding: their outputs (B, H, T, d_h), and their weights (B, H, T, S)."""
        if is_causal(attn_mask):
            raise ValueError("attn_mask: causal_mask is of a whole sentence; leave it out in incremental decoding")
        tgt_len, bsz = query.size(0), query.size(1)
        buffer, table = self.extend_cache(incremental_state, k, v, key_padding_mask)
        keys, values, rows = buffer.get("keys"), buffer["values"], table["rows"]
        assert values is not None and rows is not None
        if keys is not None:
            keys = cache.read(keys, table, self.num_query_key_heads)
        src_len = rows.size(2)
        groups = self.synthesizer(Inputs(query, q, keys, src_len - tgt_len, src_len))
        padding = table.get("prev_key_padding_mask")
        weights = self.weights_of(groups, tgt_len, src_len, padding, attn_mask, bsz).to(v.dtype)
        return cache.weighted_values(drop(weights, self.dropout(), bsz), values, table), weights

    def dropout(self) -> float:
        """The probability of dropping a weight in this call."""
        module = self.dropout_module
        return module.p if self.training or module.apply_during_inference else 0.0

    def extend_cache(
        self,
        incremental_state: dict[str, dict[str, Tensor | None]],
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None,
    ) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        """This layer's cache and its table with the newest tokens, as `cache` describes them."""
        own, shared = self.own_table, self.shared_table
        buffer = self._get_input_buffer(incremental_state)
        saved = buffer.get("prev_value")
        if saved is not None:  # of fairseq's layer, where it is called with prev_self_attn_state
            table = cache.extend({}, saved, 0, buffer.get("prev_key_padding_mask"))
            buffer = cache.write_both({}, buffer.get("prev_key") if k is not None else None, saved, table)
            incremental_state[own] = table
        if own in incremental_state or shared not in incremental_state:
            values = buffer.get("values")
            capacity = 0 if values is None else values.size(0) // self.num_heads
            table = cache.extend(incremental_state.get(own, {}), v, capacity, key_padding_mask)
            incremental_state[own] = table
        else:
            table = incremental_state[shared]  # another layer has extended it
        buffer = cache.write_both(buffer, k, v, table)
        self._set_input_buffer(incremental_state, buffer)
        return buffer, table

    def share_table(self, other: "SyntheticAttention") -> None:
        """Decodes by the block table of another attention, which sees every step before this one."""
        self.shared_table = other.own_table

    def make_generation_fast_(self, **_: Any) -> None:
        """fairseq's hook before generation: weights of mixtures and 1 / sqrt(d_h) go into the parameters, for good."""
        if self.q_proj is not None and not is_plain_linear(self.q_proj):
            return
        if not isinstance(self.out_proj, nn.Linear):  # a quantized one
            return
        with torch.no_grad():
            mixtures = self.synthesizer.mixtures()  # type: ignore[operator]
            like: Any = self.out_proj.weight
            factors = [mixture.fold_weights_(like) for mixture in mixtures]
            if self.q_proj is not None:
                rows = torch.cat([x for x in factors if x is not None]).repeat_interleave(self.head_dim)
                for x in (self.q_proj.weight.t(), self.q_proj.bias):  # type: ignore[operator]
                    x.mul_(rows)  # type: ignore[operator]

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Queries and keys, where the synthesizer reads them, and values of the input (T, B, C), each by head."""
        if self.training and self.num_query_key_heads > 0 and not is_recorded():
            # one product, and one for each gradient: fewer kernels, and no sum of three gradients of x
            modules: Any = self._modules
            layer = joined(modules["q_proj"], modules["k_proj"], modules["v_proj"])
            if layer is not None:
                packed = F.linear(x.flatten(0, 1), *layer)
                heads = [self.num_query_key_heads, self.num_query_key_heads, self.num_heads]
                parts = packed.view(x.size(0), x.size(1), sum(heads), self.head_dim).split_with_sizes(heads, dim=2)
                q, k, v = [part.permute(1, 2, 0, 3) for part in parts]
                return q, k, v
        if self.q_proj is None or self.k_proj is None:
            return None, None, self.split_heads(self.v_proj(x))
        return self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x)), self.split_heads(self.v_proj(x))

    def weights_of(
        self,
        groups: list[Logits],
        tgt_len: int,
        src_len: int,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        bsz: int,
    ) -> Tensor:
        """The attention weights of all heads, (B or 1, H, T, S); `bsz` is B, or -1 for 1 if they are shared."""
        call = (tgt_len, src_len, key_padding_mask, attn_mask)
        parts = [attention_weights(logits, heads, *call, bsz=bsz) for logits, heads in zip(groups, self.heads)]
        if len(parts) == 1:
            return parts[0]
        bsz = max(part.size(0) for part in parts)
        return torch.cat([part.expand(bsz, -1, -1, -1) for part in parts], dim=1)

    def split_heads(self, x: Tensor) -> Tensor:
        """(T, B, C) -> (B, H, T, d_h), without a copy; fewer heads where the projection has fewer."""
        return x.reshape(x.size(0), x.size(1), x.size(2) // self.head_dim, self.head_dim).permute(1, 2, 0, 3)

    def reorder_incremental_state(
        self, incremental_state: dict[str, dict[str, Tensor | None]], new_order: Tensor
    ) -> dict[str, dict[str, Tensor | None]]:
        """Reorders the cache to the hypotheses that the beam search goes on with."""
        own = self.own_table
        if own in incremental_state:
            incremental_state[own] = cache.reorder(incremental_state[own], new_order)
        buffer = self._get_input_buffer(incremental_state)
        if "prev_value" in buffer:
            self._set_input_buffer(incremental_state, cache.reorder(buffer, new_order))
        return incremental_state

    def _get_input_buffer(
        self, incremental_state: dict[str, dict[str, Tensor | None]] | None
    ) -> dict[str, Tensor | None]:
        return self.get_incremental_state(incremental_state, "attn_state") or {}  # type: ignore[operator]

    def _set_input_buffer(
        self, incremental_state: dict[str, dict[str, Tensor | None]], buffer: dict[str, Tensor | None]
    ) -> dict[str, dict[str, Tensor | None]] | None:
        return self.set_incremental_state(incremental_state, "attn_state", buffer)  # type: ignore[operator]

    def __prepare_scriptable__(self) -> ScriptableAttention:
        return ScriptableAttention(self)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        # not in an upgrade_state_dict_named of this class, which runs before --encoder-layers-to-keep renames layers.
        # fairseq's own splits the one projection of queries, keys and values that its older checkpoints have
        MultiheadAttention.upgrade_state_dict_named(self, state_dict, prefix.rstrip("."))
        prepare(state_dict, prefix, self.synthesizer)
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_self_attention(query: Tensor, **others: Tensor | None) -> None:
    """Raises ValueError if `key` or `value` is there and not the same memory as `query`."""
    for name, other in others.items():
        if other is None or other is query or torch.compiler.is_compiling():
            continue
        if other.data_ptr() != query.data_ptr() or other.size() != query.size() or other.stride() != query.stride():
            raise ValueError(f"{name}: must be the same tensor as query, as this is self-attention")
