"""Self-attention over synthesized logits, in the place of fairseq's MultiheadAttention.

The projections are here. `synthesizers` computes the logits, `computations` the softmax with its masks and dropout, and
`cache` holds what decoding needs of earlier tokens.
"""

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor

from . import cache
from .checkpoint_compatibility import adapt_checkpoint
from .computations import attend
from .computations.plain import attention_weights, drop, join_heads, weighted_sum
from .errors import SynthesizerError
from .linear import LinearWeights, is_plain_linear, join_linear_layers, read_linear_weights, read_module
from .logits import Logits
from .masks import is_causal, to_boolean_or_float, without_hidden_padding
from .positions import Inputs
from .synthesizers import LayerSynthesizer
from .tensors import is_recorded

# The state of a decoder, a dictionary of fairseq. Each attention has two entries: a `LayerCache` and a `BlockTable`.
IncrementalState = dict[str, Any]


class Projections(NamedTuple):
    """Queries, keys and values of each head. Queries and keys are None if no function reads them."""

    q: Tensor | None  # (B, heads with queries, T, d_h)
    k: Tensor | None  # (B, heads with queries, T, d_h)
    v: Tensor  # (B, H, T, d_h)


@with_incremental_state
class SyntheticAttention(nn.Module):
    """Multi-head self-attention ``softmax(S(X)) G(X)`` (eq. 3), where S comes from a `LayerSynthesizer`.

    With ``vanilla`` alone, the state dict is that of fairseq's MultiheadAttention, key by key and, from the same seed,
    bit by bit. Any other function adds keys ``synthesizer.*``. Without ``vanilla`` there is no q_proj and no k_proj.

    Args:
        embed_dim: Width C of the layer, a multiple of `num_heads`.
        num_heads: H.
        synthesizer: Computes the logits; built for the same number of heads of the same width.
        dropout: Probability of dropping an attention weight.
        q_noise, qn_block_size: Quantization noise on the projections, and its block size.

    Attributes:
        loads_stock_checkpoint: Whether the next checkpoint to be loaded is that of a stock Transformer. Only
            `adapt_checkpoint` reads this. A model sets it in all its attentions before it loads a checkpoint.

    Raises:
        ValueError: `embed_dim` is no multiple of `num_heads`, or the synthesizer is built for other heads.
    """

    loads_stock_checkpoint = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        synthesizer: LayerSynthesizer,
        dropout: float = 0.0,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
    ) -> None:
        """Builds the attention, with initial values. The arguments are described at the class."""
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        head_dim = embed_dim // num_heads
        check_heads(synthesizer, num_heads, head_dim)

        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_query_heads = count_query_heads(synthesizer)  # 0 if no function reads queries and keys

        # The name is that of fairseq's attention. With ``--retain-dropout-modules MultiheadAttention``, fairseq looks
        # for it to find the dropouts that stay active in generation.
        self.dropout_module = FairseqDropout(dropout, module_name="MultiheadAttention")
        self.build_projections(q_noise, qn_block_size)
        self.synthesizer = synthesizer
        self.reset_parameters()  # gives values to the parameters of the projections and the synthesizer

        # In decoding, all layers keep what they need of earlier tokens in one dictionary, `incremental_state`. This
        # layer has two entries: its attention keys and values (`cache.LayerCache`), and a table that says which of them
        # belong to which hypothesis of the beam search (`cache.BlockTable`).
        self.vectors_key = self.state_key("vectors")
        self.table_key = self.state_key("table")
        # In a decoder, all layers read the table of the first layer, for which the decoder calls `share_table`. Before
        # that, a layer reads its own table.
        self.first_layers_table_key = self.table_key

    def build_projections(self, q_noise: float, qn_block_size: int) -> None:
        """Builds the linear layers for keys, values, queries and output, in the order of fairseq's own attention.

        From the same seed, both attentions then get the same weights. If no head reads queries and keys, ``k_proj`` and
        ``q_proj`` are None.

        Args:
            q_noise, qn_block_size: Quantization noise, and its block size.
        """

        def build_projection(output_width: int) -> nn.Module:
            """Returns a linear layer from C features to `output_width`."""
            return quant_noise(nn.Linear(self.embed_dim, output_width), q_noise, qn_block_size)

        has_queries = self.num_query_heads > 0
        query_width = self.num_query_heads * self.head_dim
        # Each layer draws random numbers, so their order matters.
        self.k_proj = build_projection(query_width) if has_queries else None
        self.v_proj = build_projection(self.embed_dim)
        self.q_proj = build_projection(query_width) if has_queries else None
        self.out_proj = build_projection(self.embed_dim)

    def reset_parameters(self) -> None:
        """Initialises the projections as fairseq does, and then the synthesizer."""
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            if projection is not None:
                nn.init.xavier_uniform_(weight_of(projection), gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(weight_of(self.out_proj))
        nn.init.constant_(cast(Tensor, self.out_proj.bias), 0.0)
        self.synthesizer.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output of the attention and, if asked for, its weights. The arguments are those of fairseq's.

        Args:
            query: (T, B, C), the positions 0 to T - 1 of the sentences, or the newest tokens in decoding.
            key, value: The same tensor as `query`, or None, because this is self-attention.
            key_padding_mask: (B, T), true at padding, for the tokens of this call.
            incremental_state: In decoding, the state of the decoder, to which the newest tokens are added in place.
                Otherwise None.
            need_weights: Whether to return the attention weights, averaged over the heads.
            attn_mask: (T, S), boolean with true for hidden keys, or floating point to add to the logits; or the
                `causal_mask`, which is the fast way to say that a decoder looks back only.
            need_head_weights: Whether to return the attention weights of each head.

        Returns:
            the output, (T, B, C), and the weights: None, (B, T, S) averaged over the heads, or (H, B, T, S) for each
            head. A row that may see no key has the output ``out_proj(0)`` and weights of 0. But if no weights are
            returned, the output of a sentence that consists of padding alone has any finite values.
        """
        check_self_attention(query, key, value)
        attn_mask = to_boolean_or_float(attn_mask)
        key_padding_mask = without_hidden_padding(key_padding_mask, attn_mask)
        q, k, v = self.project(query)

        tgt_len, bsz, _ = query.size()
        src_len = tgt_len
        memory = None
        if incremental_state is not None:
            if is_causal(attn_mask):
                raise ValueError(
                    "attn_mask: causal_mask is for whole sentences; leave out attn_mask in incremental decoding"
                )
            # The queries are those of the newest tokens. Keys, values and padding are now those of all tokens so far.
            memory = self.remember(incremental_state, k, v, key_padding_mask)
            k = cache.read_keys(memory.vectors, memory.table, self.num_query_heads)
            src_len = memory.table.rows.shape[2]
            key_padding_mask = memory.table.key_padding_mask

        synthesizer: LayerSynthesizer = read_module(self, "synthesizer")
        start = src_len - tgt_len  # the position of the first query
        logits = synthesizer(Inputs(query, q, k, start, src_len))  # S for each group of heads

        returns_weights = need_weights or need_head_weights
        if memory is None and not returns_weights:
            # This is the usual case. The weights need not exist as a whole.
            out = self.attend_in_groups(logits, v, key_padding_mask, attn_mask)
            return self.project_out(out, query.size()), None

        # Sentences with the same logits share their weights, which are (1, H, T, S) then. But in decoding, there are
        # weights for each of the B hypotheses, because their values are in different rows of the cache.
        bsz_of_weights = None if memory is None else bsz
        weights = self.compute_weights(logits, tgt_len, src_len, key_padding_mask, attn_mask, bsz_of_weights)
        weights = weights.to(v.dtype)
        kept_weights = drop(weights, self.dropout(), bsz)
        if memory is None:
            out = weighted_sum(kept_weights, v)
        else:
            out = cache.weighted_values(kept_weights, memory.vectors, memory.table)
        out = self.project_out(join_heads(out), query.size())

        if not returns_weights:
            return out, None
        weights = weights.expand(bsz, -1, -1, -1)  # The weights before dropout are returned.
        if need_head_weights:
            return out, weights.transpose(0, 1)
        return out, weights.mean(dim=1)

    def project(self, x: Tensor) -> Projections:
        """Returns the queries, keys and values of the layer's input (T, B, C).

        Queries and keys are None if no head reads them. In training, one matrix product computes all three, which is
        faster than three products. This is not possible if a projection has hooks or is quantized.
        """
        v_proj = read_module(self, "v_proj")
        if self.num_query_heads == 0:
            return Projections(q=None, k=None, v=self.split_heads(v_proj(x)))
        q_proj = read_module(self, "q_proj")
        k_proj = read_module(self, "k_proj")

        joined = None
        # If torch traces or compiles the model, its recording is to have the three products of inference.
        if self.training and not is_recorded():
            joined = join_linear_layers([q_proj, k_proj, v_proj])  # None if a projection has hooks or is quantized
        if joined is not None:
            return self.project_at_once(x, joined)

        q = self.split_heads(q_proj(x))
        k = self.split_heads(k_proj(x))
        v = self.split_heads(v_proj(x))
        return Projections(q, k, v)

    def project_at_once(self, x: Tensor, joined: LinearWeights) -> Projections:
        """Returns queries, keys and values, computed by one matrix product in place of three.

        This is faster in training, because the gradient of the input is one product, too, in place of a sum of three.

        Args:
            x: The layer's input, (T, B, C).
            joined: The weights of a linear layer that computes queries, keys and values side by side.
        """
        tgt_len, bsz, _ = x.size()
        features = F.linear(x.flatten(0, 1), joined.weight, joined.bias)  # (T B, d_h for each head of q, k and v)
        # All heads of the layer have values, but maybe only some have queries and keys.
        heads_of_q_k_v = [self.num_query_heads, self.num_query_heads, self.num_heads]
        by_head = features.view(tgt_len, bsz, sum(heads_of_q_k_v), self.head_dim)
        q, k, v = by_head.split_with_sizes(heads_of_q_k_v, dim=2)  # (T, B, heads, d_h) each
        # (T, B, heads, d_h) -> (B, heads, T, d_h)
        return Projections(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))

    def split_heads(self, x: Tensor) -> Tensor:
        """Returns projected tokens (T, B, heads d_h) as (B, heads, T, d_h), without a copy."""
        tgt_len, bsz, width = x.size()
        return x.reshape(tgt_len, bsz, width // self.head_dim, self.head_dim).permute(1, 2, 0, 3)

    def project_out(self, out: Tensor, size: torch.Size) -> Tensor:
        """Returns the output of the layer, (T, B, C), by applying the output projection to the outputs of the heads.

        Args:
            out: The outputs of the heads side by side, (T B, C).
            size: The size of the result, (T, B, C).
        """
        out_proj = read_module(self, "out_proj")
        weights = read_linear_weights(out_proj)
        if weights is None:
            # The module has to be called itself, for example because it has hooks or is quantized.
            return out_proj(out.view(size))
        # This is faster, because `out` is a matrix here, and a tensor of three dimensions above.
        return F.linear(out, weights.weight, weights.bias).view(size)

    def dropout(self) -> float:
        """Returns the probability of dropping an attention weight in this call."""
        module: FairseqDropout = read_module(self, "dropout_module")
        if self.training or module.apply_during_inference:
            return module.p
        return 0.0

    def attend_in_groups(
        self, logits: list[Logits], v: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor:
        """Returns ``softmax(S) V`` of all heads, (T B, C), without keeping the attention weights.

        `computations.attend` computes it for each group of heads on its own, in the fastest way for the group.

        Args:
            logits: S for each group of heads. The heads of a group have the same synthesizing functions.
            v: V of all heads, (B, H, T, d_h).
            key_padding_mask, attn_mask: As in `computations.attend`.
        """
        dropout = self.dropout()
        if len(logits) == 1:
            # Without `split`, the backward pass need not copy the gradient of the values.
            return attend(logits[0], v, key_padding_mask, attn_mask, dropout)
        values = v.split(self.heads_of_groups(), dim=1)
        outputs = []  # for each group (T B, d_h times the number of its heads)
        for group_logits, group_values in zip(logits, values):
            outputs.append(attend(group_logits, group_values, key_padding_mask, attn_mask, dropout))
        return torch.cat(outputs, dim=-1)

    def compute_weights(
        self,
        logits: list[Logits],
        tgt_len: int,
        src_len: int,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        bsz: int | None,
    ) -> Tensor:
        """Returns the attention weights of all heads, (B, H, T, S), computed for each group of heads on its own.

        Args:
            logits: The attention logits of each group of heads.
            tgt_len: T, the number of rows, one for each query.
            src_len: S, the number of columns, one for each key.
            key_padding_mask, attn_mask: As in `computations.plain.attention_weights`.
            bsz: B, the number of sentences, to compute weights for each of them. With None, the weights are computed
                only once, (1, H, T, S), if they are the same for all sentences.
        """
        weights_by_group = []
        for group_logits, num_heads in zip(logits, self.heads_of_groups()):
            weights_by_group.append(
                attention_weights(group_logits, num_heads, tgt_len, src_len, key_padding_mask, attn_mask, bsz=bsz)
            )
        if len(weights_by_group) == 1:
            return weights_by_group[0]
        # With None as `bsz`, some groups may have the same weights for all sentences, and other groups may not.
        return join_weights(weights_by_group)

    def heads_of_groups(self) -> list[int]:
        """Returns the number of heads in each group. The heads of a group have the same synthesizing functions."""
        synthesizer: LayerSynthesizer = read_module(self, "synthesizer")
        return [mixture.num_heads for mixture in synthesizer.mixtures()]

    # ---- decoding

    def remember(
        self,
        incremental_state: IncrementalState,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None,
    ) -> "Memory":
        """Adds the newest tokens to the decoder's state, and returns the keys and values of all tokens so far.

        The state has two kinds of entries: the *vectors* of each layer, which are its keys and values as rows of two
        matrices; and a *block table*, which says which of these rows belong to which hypothesis.

        Args:
            incremental_state: The state of the decoder, which is changed in place.
            k: The keys of the newest tokens, (B, heads with keys, n, d_h), or None if no head reads keys.
            v: The values of the newest tokens, (B, H, n, d_h).
            key_padding_mask: The padding of these tokens, (B, n), or None.
        """
        # The table comes first, because it says to which rows the new vectors are written.
        table = self.table_with_newest_tokens(incremental_state, newest_values=v, key_padding_mask=key_padding_mask)
        old_vectors: cache.LayerCache | None = incremental_state.get(self.vectors_key)  # None before the first token
        vectors = cache.append_to_layer(old_vectors, newest_keys=k, newest_values=v, table=table)
        incremental_state[self.vectors_key] = vectors
        return Memory(vectors=vectors, table=table)

    def table_with_newest_tokens(
        self, incremental_state: IncrementalState, newest_values: Tensor, key_padding_mask: Tensor | None
    ) -> cache.BlockTable:
        """Returns the block table that this layer uses in this step of decoding; it contains the newest tokens.

        All layers of a decoder write the same token to the same row of their matrices, so they share one table. A step
        calls the layers in their order: the first layer adds the newest tokens to the table, and the later layers read
        it.

        Args:
            incremental_state: The state of the decoder, in which the first layer replaces the table.
            newest_values: The values of the newest tokens, (B, H, n, d_h). Only their sizes are read.
            key_padding_mask: The padding of these tokens, (B, n), or None.
        """
        if self.has_own_table(incremental_state):  # This is the first layer, or it is called without its decoder.
            return self.extend_own_table(incremental_state, newest_values, key_padding_mask)
        table: cache.BlockTable = incremental_state[self.first_layers_table_key]  # extended in this step already
        return table

    def has_own_table(self, incremental_state: IncrementalState) -> bool:
        """Returns whether this layer has to extend a block table of its own in this step of decoding.

        In a decoder only the first layer does. All later layers use its table, with two exceptions: a layer that got
        earlier tokens of its own from `_set_input_buffer`, and a layer that is called without its decoder.
        """
        is_first_layer = self.first_layers_table_key == self.table_key
        has_earlier_tokens_of_its_own = self.table_key in incremental_state
        is_called_without_decoder = self.first_layers_table_key not in incremental_state
        return is_first_layer or has_earlier_tokens_of_its_own or is_called_without_decoder

    def extend_own_table(
        self, incremental_state: IncrementalState, newest_values: Tensor, key_padding_mask: Tensor | None
    ) -> cache.BlockTable:
        """Extends the block table of this layer by the newest tokens, and returns the new table.

        The vectors of a layer, which are its keys and values, are rows of matrices. The block table has the numbers of
        the rows that belong to each hypothesis of the beam search. Here, the newest tokens get row numbers. Their keys
        and values are written to these rows afterwards, by `remember`.

        Args:
            incremental_state: The state of the decoder, in which the table is replaced.
            newest_values: The values of the newest tokens, (B, H, n, d_h). Only their sizes are read.
            key_padding_mask: The padding of these tokens, (B, n), or None.
        """
        # Both are None before the first token.
        old_table: cache.BlockTable | None = incremental_state.get(self.table_key)
        old_vectors: cache.LayerCache | None = incremental_state.get(self.vectors_key)
        # The old vectors are only asked how many rows there are. If too few are free, the new table tells the layers to
        # go on with larger matrices.
        new_table = cache.extend_table(old_table, old_vectors, newest_values, key_padding_mask)
        incremental_state[self.table_key] = new_table
        return new_table

    def share_table(self, first: "SyntheticAttention") -> None:
        """Makes this later layer of a decoder read the block table of the first layer, which is called before it.

        The table belongs to the first layer and not to the decoder, so that an attention can also decode alone.
        """
        self.first_layers_table_key = first.table_key

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> IncrementalState:
        """Changes the state to the hypotheses with which the beam search goes on, in place, and returns it.

        Only the block table is reordered, by the layer that owns it. Keys and values stay where they are.

        Args:
            incremental_state: The state of the decoder.
            new_order: Hypothesis i goes on from the old hypothesis ``new_order[i]``.
        """
        table: cache.BlockTable | None = incremental_state.get(self.table_key)
        if table is not None:
            incremental_state[self.table_key] = table.reorder(new_order)
        return incremental_state

    def _set_input_buffer(
        self, incremental_state: IncrementalState, buffer: dict[str, Tensor | None]
    ) -> IncrementalState:
        """Makes this layer remember the tokens of a buffer in place of its earlier tokens, and returns the state.

        fairseq's decoder layer calls this method, by this name, with its argument ``prev_self_attn_state``.

        Args:
            incremental_state: The state of the decoder, in which two entries of this layer are replaced: the vectors,
                which are its keys and values, and the table, which says to which hypothesis each vector belongs.
            buffer: ``prev_key`` and ``prev_value`` of t tokens, (B, H, t, d_h), and perhaps ``prev_key_padding_mask``.
        """
        values = buffer["prev_value"]
        assert values is not None
        keys = None  # Heads without queries read no keys.
        if self.num_query_heads > 0:
            keys = buffer.get("prev_key")
        padding = buffer.get("prev_key_padding_mask")
        memory = make_memory(keys, values, padding)
        incremental_state[self.vectors_key] = memory.vectors
        incremental_state[self.table_key] = memory.table
        return incremental_state

    def _get_input_buffer(self, incremental_state: IncrementalState | None) -> dict[str, Tensor | None]:
        """Returns an empty buffer, which fairseq's decoder layer asks for but only reads with cross-self-attention."""
        return {}

    def state_key(self, name: str) -> str:
        """Returns the key of an entry of this module in the incremental state."""
        key: str = cast(Any, self)._get_full_incremental_state_key(name)
        return key

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuses TorchScript: torch calls this for every module of a model that it is to script."""
        raise SynthesizerError(
            "torch.jit.script: TorchScript is not supported by models with synthesized attention; use the model as it "
            "is, torch.compile or torch.jit.trace"
        )

    # ---- checkpoints

    def make_generation_fast_(self, **_: Any) -> None:
        """Changes the parameters so that generation is faster. fairseq calls this method, by this name, before it.

        The weights of mixtures and the scale 1 / sqrt(d_h) of dot products are multiplied into the parameters once, and
        no longer into the logits of each call. The attention keeps its output, but cannot be trained any more.

        Nothing is changed if there are hooks on the projection of the queries, or if projections are quantized.
        """
        if not self.can_be_folded():
            return
        with torch.no_grad():
            # The weight and scale of dot products are multiplied into q_proj. This has to come first, because
            # `fold_weights_` removes them from the mixtures.
            if self.q_proj is not None:
                self.scale_queries_(self.factors_of_dot_products())
            # The weights of all other functions are multiplied into the parameters of these functions.
            for mixture in self.synthesizer.mixtures():
                mixture.fold_weights_(like=weight_of(self.out_proj))

    def factors_of_dot_products(self) -> Tensor:
        """Returns the number by which the dot products of each head with queries are multiplied, (heads with queries,).

        For example, the groups of heads ``random:2/vanilla:4/dense+vanilla:2`` have a mixture each. The 2 heads of
        ``random`` have no queries. So there are 6 numbers: 4 of the second mixture, and then 2 of the third one. The
        heads in q_proj have the same order.
        """
        factors = []
        for mixture in self.synthesizer.mixtures():
            if mixture.reads_query_key:
                factors.append(mixture.factor_of_dot_products(like=weight_of(self.out_proj)))
        return torch.cat(factors)

    def scale_queries_(self, factor_of_each_head: Tensor) -> None:
        """Changes the query projection so that the queries of each head are multiplied by its factor.

        Args:
            factor_of_each_head: (heads with queries,)
        """
        assert self.q_proj is not None
        # A head has d_h neighbouring features.
        factor_of_each_feature = factor_of_each_head.repeat_interleave(self.head_dim)
        weight_of(self.q_proj).mul_(factor_of_each_feature[:, None])
        cast(Tensor, self.q_proj.bias).mul_(factor_of_each_feature)

    def can_be_folded(self) -> bool:
        """Returns whether `make_generation_fast_` can change the projection of the queries, if there is one."""
        has_plain_queries = self.q_proj is None or is_plain_linear(self.q_proj)
        is_quantized = not isinstance(self.out_proj, nn.Linear)  # all projections are, or none
        return has_plain_queries and not is_quantized

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Loads the parameters from a checkpoint, which is adapted first. torch calls this for every module.

        The method `upgrade_state_dict_named` would be too early for this, because fairseq calls it before
        --encoder-layers-to-keep renames layers.
        """
        # Older checkpoints of fairseq have one projection for queries, keys and values, which is split here.
        MultiheadAttention.upgrade_state_dict_named(self, state_dict, prefix.rstrip("."))
        adapt_checkpoint(state_dict, prefix, self.synthesizer, self.loads_stock_checkpoint)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Memory(NamedTuple):
    """The keys and values of all tokens so far, and a table that says which of them belong to which hypothesis."""

    vectors: cache.LayerCache
    table: cache.BlockTable


def make_memory(keys: Tensor | None, values: Tensor, key_padding_mask: Tensor | None) -> Memory:
    """Returns the memory of a layer that has decoded only these t tokens of each hypothesis.

    Args:
        keys: (B, heads with keys, t, d_h), or None if no head reads keys.
        values: (B, H, t, d_h).
        key_padding_mask: (B, t), true at padding, or None.
    """
    # The tokens are added to an empty memory, in which both parts are None.
    table = cache.extend_table(table=None, layer_cache=None, newest_values=values, key_padding_mask=key_padding_mask)
    vectors = cache.append_to_layer(layer_cache=None, newest_keys=keys, newest_values=values, table=table)
    return Memory(vectors=vectors, table=table)


def join_weights(weights_by_group: list[Tensor]) -> Tensor:
    """Returns the attention weights of all heads, (B, H, T, S), by joining those of several groups of heads.

    Args:
        weights_by_group: (B, heads of the group, T, S) for each group; or (1, heads of the group, T, S) if all
            sentences have the same weights. If every group has size 1 there, so has the result.
    """
    bsz = max(weights.shape[0] for weights in weights_by_group)
    expanded_weights = [weights.expand(bsz, -1, -1, -1) for weights in weights_by_group]
    return torch.cat(expanded_weights, dim=1)


def count_query_heads(synthesizer: LayerSynthesizer) -> int:
    """Returns the number of heads that have queries and keys, because one of their functions reads them."""
    num_query_heads = 0
    for mixture in synthesizer.mixtures():  # Each mixture is for a group of heads.
        if mixture.reads_query_key:
            num_query_heads += mixture.num_heads
    return num_query_heads


def check_heads(synthesizer: LayerSynthesizer, num_heads: int, head_dim: int) -> None:
    """Raises ValueError if a synthesizer is built for another number or width of heads than an attention.

    Args:
        synthesizer: The synthesizer.
        num_heads, head_dim: The number of heads of the attention, and their width.
    """
    mixtures = synthesizer.mixtures()
    num_built_heads = sum(mixture.num_heads for mixture in mixtures)
    built_widths = sorted({mixture.head_dim for mixture in mixtures})
    if num_built_heads != num_heads or built_widths != [head_dim]:
        raise ValueError(
            f"the synthesizer has {num_built_heads} heads of width {', '.join(map(str, built_widths))}, and the "
            f"attention has {num_heads} of width {head_dim}: give both the same num_heads and head_dim"
        )


def weight_of(layer: nn.Module) -> Tensor:
    """Returns the weight of a linear layer. The cast tells type checkers that it is a tensor."""
    return cast(Tensor, layer.weight)


def check_self_attention(query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
    """Raises ValueError if `key` or `value` is given and is not the same memory as `query`."""
    if key is query and value is query:
        return
    for name, tensor in (("key", key), ("value", value)):
        if tensor is None or tensor is query or torch.compiler.is_compiling():
            continue
        # It may be another view of the same memory.
        has_same_shape = tensor.size() == query.size() and tensor.stride() == query.stride()
        if tensor.data_ptr() != query.data_ptr() or not has_same_shape:
            raise ValueError(f"{name}: must be the same tensor as query, as this is self-attention")
