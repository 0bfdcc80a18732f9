"""Builds Linformer (Wang et al. 2020, arXiv 2006.04768), a baseline: its encoder attends to k projected positions."""

import argparse
from typing import Any

import torch
import torch.nn as nn
from fairseq.dataclass import ChoiceEnum
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor

from .config import check_attention, config_class, kept_layers, make_flag
from .errors import SynthesizerError
from .layers import AlignedEncoder, EncoderLayer, wrap_layer
from .lengths import Limit
from .roberta import ROBERTA_FLAGS, STRUCTURE_FLAGS, SynthesizerRoberta, SynthesizerRobertaEncoder
from .synthesizers import glorot_uniform_

# Which of the projections E and F are the same parameter. Each choice shares more than the choice before it.
SHARING = ("none", "headwise", "key-value", "layerwise")

LINFORMER_FLAGS = [
    make_flag("linformer_k", int, 64, "number of positions that keys and values are projected to (k in the paper)"),
    make_flag(
        "linformer_sharing",
        ChoiceEnum(SHARING),
        "layerwise",
        "which projections are shared: 'none'; 'headwise', between the heads of a layer; 'key-value', also between "
        "keys and values; 'layerwise', also between all layers",
    ),
]


class LinformerAttention(nn.Module):
    """Computes Linformer's multi-head self-attention ``softmax(Q (E K)^T / sqrt(d)) F V`` (eq. 7).

    E and F, of size (k, n), project the keys and values of a sentence's tokens to k positions. A sentence of T tokens
    uses their first T columns. Keys and values at padding are set to 0, so that padding has no effect on the k
    projected positions.

    Args:
        embed_dim: C, the width of the layer; a multiple of `num_heads`.
        num_heads: H.
        max_length: n, the longest sentence.
        k: the number of projected positions.
        sharing: which projections are the same parameter. ``none``: each head has an E and an F. ``headwise``: the
            heads share one E and one F. ``key-value`` and ``layerwise``: the heads share one E, which is F too. (With
            ``layerwise``, the encoder then makes all layers share their E.)
        dropout: the probability of dropping an attention weight.
        q_noise: the quantization noise on the projections.
        qn_block_size: the block size of that noise.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_length: int,
        k: int,
        sharing: str,
        dropout: float = 0.0,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
    ) -> None:
        """Builds the layers and parameters of one attention. The class describes the arguments."""
        super().__init__()
        self.num_heads = num_heads
        # --retain-dropout-modules finds the dropout by the name of fairseq's class.
        self.dropout_module = FairseqDropout(dropout, module_name="MultiheadAttention")
        self.q_proj = quant_noise(nn.Linear(embed_dim, embed_dim), q_noise, qn_block_size)
        self.k_proj = quant_noise(nn.Linear(embed_dim, embed_dim), q_noise, qn_block_size)
        self.v_proj = quant_noise(nn.Linear(embed_dim, embed_dim), q_noise, qn_block_size)
        self.out_proj = quant_noise(nn.Linear(embed_dim, embed_dim), q_noise, qn_block_size)
        # E (in the paper's terms) projects the keys, and F the values, from `max_length` tokens to k positions.
        keys_and_values_share_projection = sharing in ("key-value", "layerwise")
        self.E = new_projection(num_heads, k, max_length, sharing)
        if keys_and_values_share_projection:
            self.F = self.E
        else:
            self.F = new_projection(num_heads, k, max_length, sharing)
        # The paper does not say how E and F are initialised.
        glorot_uniform_(self.E)
        # If F is E, this draws the values of E again. It stays, so that the same seed gives the same weights as so far.
        glorot_uniform_(self.F)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the output of the attention; fairseq's encoder layer calls it with these arguments.

        The output is ``softmax(queries @ projected_keys^T / sqrt(d)) @ projected_values`` in each head.

        Args:
            query: the input of the layer, (T, B, C). Keys and values are computed from it too.
            key, value: not read, because they are the same tensor in self-attention.
            key_padding_mask: (B, T), true at padding.
            need_weights: has no effect.
            attn_mask: must be None, because each projected position is a sum over all tokens.

        Returns:
            The output (T, B, C), and None in place of attention weights. These would belong to projected positions,
            and not to tokens.
        """
        assert attn_mask is None, "attn_mask: projected positions are sums over all tokens, so no token can be masked"
        tgt_len, bsz, embed_dim = query.size()  # T, B, C
        queries = self.split_heads(self.q_proj(query))  # (B, H, T, d)
        keys = self.k_proj(query)  # (T, B, C)
        values = self.v_proj(query)  # (T, B, C)
        is_padding = None
        if key_padding_mask is not None:
            is_padding = key_padding_mask.to(torch.bool).t().unsqueeze(-1)  # (T, B, 1)
        projected_keys = self.project_tokens(keys, self.E, is_padding)  # (B, H, P, d)
        projected_values = self.project_tokens(values, self.F, is_padding)  # (B, H, P, d)
        has_dropout = self.training or self.dropout_module.apply_during_inference
        dropout = self.dropout_module.p if has_dropout else 0.0
        out = nn.functional.scaled_dot_product_attention(queries, projected_keys, projected_values, dropout_p=dropout)
        out = out.permute(2, 0, 1, 3).reshape(tgt_len, bsz, embed_dim)  # (B, H, T, d) -> (T, B, C)
        return self.out_proj(out), None

    def project_tokens(self, x: Tensor, projection: Tensor, is_padding: Tensor | None) -> Tensor:
        """Returns the keys or values of T tokens, projected to P positions, (B, H, P, d).

        P is ``--linformer-k``, the k of the paper.

        Args:
            x: the keys or values, (T, B, C).
            projection: E or F, (H, P, n) for sentences of up to n tokens; or (1, P, n) if all heads share it. T tokens
                use its first T columns.
            is_padding: (T, B, 1), true at padding, whose keys and values are set to 0; None if there is none.
        """
        if is_padding is not None:
            x = x.masked_fill(is_padding, 0.0)
        projection_of_tokens = projection[:, :, : x.shape[0]]  # (H or 1, P, T)
        return torch.matmul(projection_of_tokens, self.split_heads(x))

    def split_heads(self, x: Tensor) -> Tensor:
        """Returns the heads' slices of features, as a view: (T, B, C) -> (B, H, T, d)."""
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(1, 2, 0, 3)


def new_projection(num_heads: int, k: int, max_length: int, sharing: str) -> nn.Parameter:
    """Returns a projection E or F without values: (H, k, n), or (1, k, n) if all heads share it."""
    num_matrices = num_heads if sharing == "none" else 1
    return nn.Parameter(torch.empty(num_matrices, k, max_length))


class LinformerEncoderLayer(EncoderLayer):
    """fairseq's encoder layer around a `LinformerAttention`."""

    def build_own_attention(self, embed_dim: int, cfg: TransformerConfig) -> LinformerAttention:
        """Returns the attention of the layer, whose constructor calls this."""
        return LinformerAttention(
            embed_dim=embed_dim,
            num_heads=cfg.encoder.attention_heads,
            max_length=cfg.max_source_positions,
            k=cfg.linformer_k,
            sharing=cfg.linformer_sharing,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )


class LinformerEncoder(AlignedEncoder):
    """fairseq's encoder with `LinformerEncoderLayer`; with ``--linformer-sharing layerwise`` all layers share E."""

    def __init__(self, cfg: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.set_limit(Limit(cfg.max_source_positions, "--max-positions"))
        if cfg.linformer_sharing == "layerwise":
            shared_projection = self.layers[0].self_attn.E
            # The loop is over indices: a loop over `self.layers` leaves layers out at random with --encoder-layerdrop.
            for index in range(len(self.layers)):
                attention = self.layers[index].self_attn
                attention.E = shared_projection
                attention.F = shared_projection

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        """Returns a layer; fairseq's encoder calls this for each."""
        return wrap_layer(LinformerEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class LinformerRobertaEncoder(SynthesizerRobertaEncoder):
    """fairseq's RobertaEncoder around a `LinformerEncoder`."""

    stack = LinformerEncoder


class RobertaLinformer(SynthesizerRoberta):
    """fairseq's ``roberta`` with the self-attention of Linformer."""

    kind = "Linformer"
    stacks = ()
    config = config_class("RobertaLinformerConfig", *LINFORMER_FLAGS, *ROBERTA_FLAGS, *STRUCTURE_FLAGS)
    encoder_class = LinformerRobertaEncoder

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Loads the weights of a checkpoint; see `SynthesizerRoberta.load_state_dict`.

        This raises SynthesizerError also if the checkpoint has different values for projections that are the same
        parameter in this model.
        """
        self.check_sharing(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def check_sharing(self, state_dict: dict[str, Tensor]) -> None:
        """Checks that the checkpoint has equal values for projections that are the same parameter in this model.

        Args:
            state_dict: the weights of the checkpoint, in which a shared projection has several keys.

        Raises:
            SynthesizerError: two values of the same projection differ.
        """
        for names_of_projection in self.projection_names():
            first_name, *other_names = names_of_projection
            for name in other_names:
                # torch itself raises an error if the checkpoint lacks a weight.
                has_both = first_name in state_dict and name in state_dict
                if has_both and not torch.equal(state_dict[name], state_dict[first_name]):
                    raise SynthesizerError(
                        f"--linformer-sharing {self.args.linformer_sharing}: {first_name} and {name} are the same "
                        "parameter in this model, but differ in the checkpoint; use the --linformer-sharing of the "
                        "training"
                    )

    def projection_names(self) -> list[list[str]]:
        """Returns the names of each projection E or F of the model. A shared projection has several names.

        For example, if keys and values share their projection, the result is [[name of E and name of F in layer 0],
        [name of E and name of F in layer 1], ...].
        """
        names_by_id: dict[int, list[str]] = {}  # The key is the id of the parameter.
        # `remove_duplicate=False` lists a shared parameter under each of its names.
        for name, parameter in self.named_parameters(remove_duplicate=False):
            if name.endswith((".E", ".F")):
                names_by_id.setdefault(id(parameter), []).append(name)
        return list(names_by_id.values())

    @classmethod
    def check_and_parse_encoder(cls, args: argparse.Namespace) -> argparse.Namespace:
        """Returns the flags as they are, after checking the heads, the layers and ``--linformer-k``."""
        check_attention(args, "encoder")
        kept_layers(args, "encoder")  # raises SynthesizerError for a layer that does not exist
        if args.linformer_k < 1:
            raise SynthesizerError(f"--linformer-k {args.linformer_k}: must be at least 1")
        return args

    @classmethod
    def encoder_limit(cls, args: argparse.Namespace) -> Limit | None:
        """Returns None, because no flag but ``--max-positions`` limits the length of sentences."""
        return None
