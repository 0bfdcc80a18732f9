"""Self-attention over synthesized logits, in the place of fairseq's MultiheadAttention.

The projections are here. `synthesizers` computes the logits, `computations` the softmax with its masks and dropout, and
`cache` stores what decoding needs of earlier tokens.
"""

import logging
import math
import re
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

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
from .errors import SynthesizerError
from .linear import combined, is_plain_linear
from .logits import Logits
from .masks import is_causal, is_recorded
from .synthesizers import SYNTHESIZERS, Inputs, LayerSynthesizer

logger = logging.getLogger(__name__)


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
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        need_weights: bool = False,
        attn_mask: Optional[Tensor] = None,
        need_head_weights: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor]]:
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
        if not torch.jit.is_scripting():
            check_self_attention(query, key=key, value=value)
        tgt_len, bsz, _ = query.size()
        if attn_mask is not None and not torch.is_floating_point(attn_mask):
            attn_mask = attn_mask.to(torch.bool)
        q, k, v, packed = self.project(query)
        dropout = self.dropout_module.p
        if not (self.training or self.dropout_module.apply_during_inference):
            dropout = 0.0

        if incremental_state is None:
            groups = self.synthesizer(Inputs(self.split_heads(query), q, k, 0, tgt_len))
            if not torch.jit.is_scripting():
                if not need_weights and not need_head_weights:
                    if len(groups) == 1:  # without a slice, whose gradient is a copy
                        out = attend(groups[0], q, k, v, packed, key_padding_mask, attn_mask, dropout)
                        return self.out_proj(out), None
                    found = [
                        attend(logits, None, None, value, None, key_padding_mask, attn_mask, dropout)
                        for logits, value in zip(groups, v.split(self.heads, dim=1))
                    ]
                    return self.out_proj(torch.cat(found, dim=2)), None
            weights = self.weights_of(groups, tgt_len, tgt_len, key_padding_mask, attn_mask, -1).to(v.dtype)
            attn = weighted_sum(drop(weights, dropout, bsz), v)
        else:
            if is_causal(attn_mask):
                raise ValueError("attn_mask: causal_mask is of a whole sentence; leave it out in incremental decoding")
            buffer, table = self.extend_cache(incremental_state, k, v, key_padding_mask)
            keys, values, rows = buffer.get("keys"), buffer["values"], table["rows"]
            assert values is not None and rows is not None
            if keys is not None:
                keys = cache.read(keys, table, self.num_query_key_heads)
            src_len = rows.size(2)
            groups = self.synthesizer(Inputs(self.split_heads(query), q, keys, src_len - tgt_len, src_len))
            padding = table.get("prev_key_padding_mask")
            weights = self.weights_of(groups, tgt_len, src_len, padding, attn_mask, bsz).to(v.dtype)
            attn = cache.weighted_values(drop(weights, dropout, bsz), values, table)
        out = self.join_heads(attn)
        if need_head_weights:
            return out, weights.expand(bsz, -1, -1, -1).transpose(0, 1)
        if need_weights:
            return out, weights.expand(bsz, -1, -1, -1).mean(dim=1)
        return out, None

    def extend_cache(
        self,
        incremental_state: Dict[str, Dict[str, Optional[Tensor]]],
        k: Optional[Tensor],
        v: Tensor,
        key_padding_mask: Optional[Tensor],
    ) -> Tuple[Dict[str, Optional[Tensor]], Dict[str, Optional[Tensor]]]:
        """This layer's cache and its table with the newest tokens, as `cache` describes them."""
        own, shared = self.own_table, self.shared_table
        empty: Dict[str, Optional[Tensor]] = {}
        buffer = self._get_input_buffer(incremental_state)
        saved = buffer.get("prev_value")
        if saved is not None:  # of fairseq's layer, where it is called with prev_self_attn_state
            table = cache.extend(empty, saved, 0, buffer.get("prev_key_padding_mask"))
            buffer = cache.write_both(empty, buffer.get("prev_key") if k is not None else None, saved, table)
            incremental_state[own] = table
        if own in incremental_state or shared not in incremental_state:
            values = buffer.get("values")
            capacity = 0 if values is None else values.size(0) // self.num_heads
            table = incremental_state[own] if own in incremental_state else empty
            incremental_state[own] = cache.extend(table, v, capacity, key_padding_mask)
            table = incremental_state[own]
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

    def project(self, x: Tensor) -> Tuple[Optional[Tensor], Optional[Tensor], Tensor, Optional[Tensor]]:
        """Queries and keys, where the synthesizer reads them, and values, (B, H, T, d_h), of the input (T, B, C); and
        the tensor (T, B, features) that they are all of, if there is one."""
        if self.q_proj is None or self.k_proj is None:
            out = self.v_proj(x)
            return None, None, self.split_heads(out), out
        if not torch.jit.is_scripting():
            if self.training and not is_recorded() and is_plain_linear(self.q_proj, self.k_proj, self.v_proj):
                # one product, and one for each gradient: fewer kernels, and no sum of three gradients of x
                weight, bias = combined(x, self.q_proj, self.k_proj, self.v_proj)
                heads = [self.num_query_key_heads, self.num_query_key_heads, self.num_heads]
                out = F.linear(x, weight, bias)
                parts = out.view(x.size(0), x.size(1), sum(heads), self.head_dim).split(heads, dim=2)
                q, k, v = (part.permute(1, 2, 0, 3) for part in parts)
                return q, k, v, out
        q, k, v = self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x)), self.split_heads(self.v_proj(x))
        return q, k, v, None

    def weights_of(
        self,
        groups: List[Logits],
        tgt_len: int,
        src_len: int,
        key_padding_mask: Optional[Tensor],
        attn_mask: Optional[Tensor],
        bsz: int,
    ) -> Tensor:
        """The attention weights of all heads, (B or 1, H, T, S); `bsz` is B, or -1 for 1 if they are shared."""
        parts: List[Tensor] = []
        for logits, heads in zip(groups, self.heads):
            summands = logits.read(src_len - tgt_len, tgt_len, src_len)
            parts.append(attention_weights(summands, heads, tgt_len, src_len, key_padding_mask, attn_mask, bsz=bsz))
        if len(parts) == 1:
            return parts[0]
        bsz = max([part.size(0) for part in parts])
        return torch.cat([part.expand(bsz, -1, -1, -1) for part in parts], dim=1)

    def join_heads(self, attn: Tensor) -> Tensor:
        """(B, H, T, d_h) -> (T, B, C), through the output projection."""
        return self.out_proj(attn.permute(2, 0, 1, 3).reshape(attn.size(2), attn.size(0), self.embed_dim))

    def split_heads(self, x: Tensor) -> Tensor:
        """(T, B, C) -> (B, H, T, d_h), without a copy; fewer heads where the projection has fewer."""
        return x.reshape(x.size(0), x.size(1), x.size(2) // self.head_dim, self.head_dim).permute(1, 2, 0, 3)

    @torch.jit.export
    def reorder_incremental_state(
        self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], new_order: Tensor
    ) -> Dict[str, Dict[str, Optional[Tensor]]]:
        """Reorders the cache to the hypotheses that the beam search goes on with."""
        own = self.own_table
        if own in incremental_state:
            incremental_state[own] = cache.reorder(incremental_state[own], new_order)
        buffer = self._get_input_buffer(incremental_state)
        if "prev_value" in buffer:
            self._set_input_buffer(incremental_state, cache.reorder(buffer, new_order))
        return incremental_state

    def _get_input_buffer(
        self, incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]]
    ) -> Dict[str, Optional[Tensor]]:
        buffer = self.get_incremental_state(incremental_state, "attn_state")  # type: ignore[operator]
        if buffer is not None:
            return buffer
        empty: Dict[str, Optional[Tensor]] = {}
        return empty

    def _set_input_buffer(
        self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], buffer: Dict[str, Optional[Tensor]]
    ) -> Optional[Dict[str, Dict[str, Optional[Tensor]]]]:
        return self.set_incremental_state(incremental_state, "attn_state", buffer)  # type: ignore[operator]

    def _load_from_state_dict(self, state_dict: Dict[str, Tensor], prefix: str, *args: Any) -> None:
        # not in an upgrade_state_dict_named of this class, which runs before --encoder-layers-to-keep renames layers.
        # fairseq's own splits the one projection of queries, keys and values that its older checkpoints have
        MultiheadAttention.upgrade_state_dict_named(self, state_dict, prefix.rstrip("."))
        rename_older(state_dict, f"{prefix}synthesizer.")
        self.prepare_state_dict(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def prepare_state_dict(self, state_dict: Dict[str, Tensor], prefix: str) -> None:
        """Checks a checkpoint's synthesizer against this one, or starts this one from a stock Transformer.

        A stock checkpoint has no ``synthesizer.*``: the functions beside ``vanilla`` are silenced, so that
        ``--synth-mixture sum`` starts with the stock model's output (``fixed_random`` stays as drawn).

        Args:
            state_dict: the checkpoint's weights; completed in place for a stock checkpoint.
            prefix: this module's, with the dot.

        Raises:
            SynthesizerError: the checkpoint holds other functions, or other sizes of the same ones.
        """
        name, own_prefix = prefix.rstrip("."), f"{prefix}synthesizer."
        if not any(key.startswith(prefix) for key in state_dict):
            return  # another model altogether: strict loading lists what is missing
        own = self.synthesizer.state_dict()
        for key in own:
            if key.endswith("factorized_dense.factors") and f"{own_prefix}{key[: -len('factors')]}W2" in state_dict:
                state_dict.setdefault(own_prefix + key, own[key])  # older checkpoints do not have it
        theirs = {key[len(own_prefix) :]: value for key, value in state_dict.items() if key.startswith(own_prefix)}
        has_query = f"{prefix}q_proj.weight" in state_dict
        if is_folded(theirs) and not is_folded(own):
            raise SynthesizerError(
                f"{name}: these are weights of a model prepared for generation, which no other model can take; load "
                "the checkpoint itself"
            )
        if is_folded(own) and not is_folded(theirs):
            raise SynthesizerError(
                f"{name}: this model is prepared for generation and takes no weights of a training; load them into a "
                "new model"
            )
        if has_query and not theirs:
            self.start_from_dot_product(state_dict, prefix)
        else:
            self.check_functions(prefix, theirs, own, has_query)

    def check_functions(self, prefix: str, theirs: Dict[str, Tensor], own: Dict[str, Tensor], has_query: bool) -> None:
        """Raises SynthesizerError if a checkpoint's state dict of the synthesizer does not fit this one's, `own`."""
        name = prefix.rstrip(".")
        trained, present = functions_of(theirs), functions_of(own)
        if trained != present or has_query != (self.q_proj is not None):
            raise SynthesizerError(
                f"{name}: the checkpoint has weights of {' and '.join(sorted(trained)) or 'no function'}, and "
                f"{'query and key projections' if has_query else 'no query and key projections'}; this model has "
                f"{' and '.join(names_of(self.synthesizer))}; {functions_of_the_training(name)}"
            )
        weighted = {key for key in theirs if key.endswith("alpha")}
        if weighted != {key for key in own if key.endswith("alpha")}:
            raise SynthesizerError(
                f"{name}: the checkpoint was trained with --synth-mixture {'convex' if weighted else 'sum'}; give that"
            )
        for key, value in own.items():
            if key in theirs and theirs[key].shape != value.shape:
                raise SynthesizerError(
                    f"{prefix}synthesizer.{key} is {tuple(theirs[key].shape)} in the checkpoint and "
                    f"{tuple(value.shape)} in this model; give the --synth-max-length, --synth-rank and attention "
                    "heads of the training"
                )

    def start_from_dot_product(self, state_dict: Dict[str, Tensor], prefix: str) -> None:
        """Completes the state dict of a stock attention with functions beside ``vanilla`` whose logits are 0.

        Raises:
            SynthesizerError: this attention has no dot product, or other functions in some heads.
        """
        name, functions = prefix.rstrip("."), " and ".join(names_of(self.synthesizer))
        if len(self.heads) > 1:
            if not self.synthesizer.state_dict():
                return
            raise SynthesizerError(
                f"{name}: the checkpoint has dot-product attention in all heads, this model has heads of several "
                f"kinds; {functions_of_the_training(name)}"
            )
        (mixture,) = self.synthesizer.mixtures()  # type: ignore[operator]
        if not mixture.reads_query_key:
            raise SynthesizerError(
                f"{name}: the checkpoint has dot-product attention in this layer, this model has {functions}; "
                f"{functions_of_the_training(name)} (only vanilla and mixtures with it can start from a stock "
                "Transformer)"
            )
        if not self.synthesizer.state_dict():
            return
        logger.info(f"{name}: starting {functions} from the weights of dot-product attention")
        if mixture.alpha is not None:
            logger.warning(
                f"{name}: --synth-mixture convex scales the logits of the checkpoint down; --synth-mixture sum "
                "starts with its output"
            )
        for function, component in mixture.components.items():
            component.silence()  # type: ignore[operator]
            if not component.reads_query_key and not component.is_trained():  # type: ignore[operator]
                logger.warning(f"{name}: {function} is not trained, so its logits stay: the output changes")
        for key, value in self.synthesizer.state_dict().items():
            state_dict[f"{prefix}synthesizer.{key}"] = value.clone()


def names_of(synthesizer: LayerSynthesizer) -> List[str]:
    """The functions of a layer; where it has several groups of heads, each with its group."""
    groups = [list(mixture.components) for mixture in synthesizer.mixtures()]
    if len(groups) == 1:
        return groups[0]
    return [of_group(name, i) for i, names in enumerate(groups) for name in names]


def of_group(name: str, group: int) -> str:
    """How a message names a function of one group of heads, counted from 0."""
    return f"{name} (group {group + 1} of the heads)"


def functions_of_the_training(name: str) -> str:
    """What to do about other functions in the checkpoint, where `name` is an attention's place in the model."""
    side = name.split(".")[0]
    sides = [side] if side in ("encoder", "decoder") else ["encoder", "decoder"]
    return f"give the {' and '.join(f'--{side}-synthesizer' for side in sides)} of the training"


def rename_older(state_dict: Dict[str, Tensor], prefix: str) -> None:
    """Renames the weights of a synthesizer in older checkpoints, in place."""
    alphas: Dict[str, Dict[str, Tensor]] = {}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if key.endswith(".R.matrix"):
            state_dict[key[: -len(".matrix")]] = state_dict.pop(key)
        elif key.endswith(".R.reached"):
            del state_dict[key]
        elif key.endswith(("factorized_dense.WA", "factorized_dense.bA")):
            # the two read-outs are one matrix, and one bias
            other = state_dict.pop(f"{key[:-1]}B")
            state_dict[f"{key[:-2]}{'W2' if key[-2] == 'W' else 'b2'}"] = torch.cat([state_dict.pop(key), other], dim=1)
        elif key.endswith(".alpha") and "components." in key:
            # each component had its own row
            group, name = key.split("components.")
            alphas.setdefault(group, {})[name[: -len(".alpha")]] = state_dict.pop(key)
    for group, rows in alphas.items():
        state_dict[f"{group}alpha"] = torch.stack([rows[name] for name in SYNTHESIZERS if name in rows])


def is_folded(keys: Iterable[str]) -> bool:
    """Whether a synthesizer's state dict is of a model prepared for generation; see `Mixture.fold_weights_`."""
    return any(key.split(".")[-1] == "folded" for key in keys)


def functions_of(keys: Iterable[str]) -> Set[str]:
    """The functions that have weights in a synthesizer's state dict, named as in `names_of`."""
    found = (re.match(r"(?:groups\.(\d+)\.)?components\.(\w+)\.", key) for key in keys)
    return {of_group(match[2], int(match[1])) if match[1] else match[2] for match in found if match}


def check_self_attention(query: Tensor, **others: Optional[Tensor]) -> None:
    """Raises ValueError if `key` or `value` is there and not the same memory as `query`."""
    for name, other in others.items():
        if other is None or other is query or torch.compiler.is_compiling():
            continue
        if other.data_ptr() != query.data_ptr() or other.size() != query.size() or other.stride() != query.stride():
            raise ValueError(f"{name}: must be the same tensor as query, as this is self-attention")
