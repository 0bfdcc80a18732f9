"""Builds language models: fairseq's decoder-only Transformer with synthesized self-attention."""

import ast
from typing import Any

from fairseq.models import FairseqLanguageModel
from fairseq.models.transformer import DEFAULT_MAX_TARGET_POSITIONS, Embedding, TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import eval_str_list

from .config import SYNTHESIZER_FLAGS, check_and_parse_flags, config_class, flatten, stack_flag, stack_limit
from .errors import SynthesizerError
from .layers import SynthesizerDecoder
from .lengths import Limit, announce_limit, check_fusion, check_min_len, check_rows
from .model import SynthesizerModel

# The number of positions of a model that encodes positions by sinusoids. They exist for every position, so that this is
# just more than any row has.
SINUSOIDS = 100_000


class SynthesizerLanguageModel(SynthesizerModel, FairseqLanguageModel):
    """fairseq's ``transformer_lm`` with synthesized self-attention; the token at position t attends up to position t.

    Attributes:
        add_bos_token: whether ``--add-bos-token`` puts a token before each row, which fairseq does not count.
        takes_longer_rows: whether rows may be longer in an evaluation than in the training.
    """

    kind = "language model"
    stacks = ("decoder",)
    tasks = (LanguageModelingTask,)
    task_names = "language_modeling"
    config = config_class(
        "SynthesizerLanguageModelConfig",
        *SYNTHESIZER_FLAGS,
        stack_flag("decoder"),
        *flatten(TransformerLanguageModelConfig),
    )
    add_bos_token = False
    takes_longer_rows = False

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SynthesizerLanguageModel":
        """Returns a new model with the settings in a config; see `SynthesizerModel`."""
        args = cls.read_config(cfg, task)
        # This replaces the text of ``decoder_synthesizer`` by a list with the heads of each layer, for `stack_limit`.
        check_and_parse_flags(args, *cls.stacks)
        check_embeddings(args)
        limit = stack_limit(args, args.decoder_synthesizer)
        if args.tokens_per_sample is not None:
            check_rows("--tokens-per-sample", args.tokens_per_sample, limit, bool(args.add_bos_token))
        # This must come before ``max_target_positions`` gets a default, because only a user's value is a limit.
        takes_longer_rows = not has_limited_positions(args, limit)
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample or DEFAULT_MAX_TARGET_POSITIONS
        # This must come after `check_and_parse_flags`, which needs the number of all layers. fairseq's own build_model
        # also sets the number of layers.
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        config = TransformerConfig.from_namespace(args)
        embed_tokens: Any = build_embedding(args, task.source_dictionary)
        model = cls(SynthesizerDecoder(config, task.target_dictionary, embed_tokens, no_encoder_attn=True))
        model.add_bos_token = bool(args.add_bos_token)
        model.takes_longer_rows = takes_longer_rows
        announce_limit(task, limit)
        return model

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Prepares the model for generation or evaluation in place, as fairseq's own method does.

        From here on, rows may be longer than in the training, unless a flag or the functions limit them.

        Args:
            cfg: fairseq's whole config.

        Raises:
            SynthesizerError: ``--min-len`` is more than the model can write; or this is the model of ``--lm-path``, and
                it cannot read the longest sentence that the search may write.
        """
        super().prepare_for_inference_(cfg)
        # An evaluation may have --add-bos-token, which puts a token before each row, although the training did not.
        self.add_bos_token = self.add_bos_token or bool(getattr(cfg.task, "add_bos_token", False))
        if self.takes_longer_rows:
            self.decoder.max_target_positions = SINUSOIDS
        generation = getattr(cfg, "generation", None)
        check_min_len(generation, self.decoder)
        # This only checks something if the flags of the generation have --lm-path, which then names this model.
        check_fusion(generation, self.decoder.max_length)

    def max_positions(self) -> int:
        """Returns the longest row that the model takes, in tokens.

        The token that ``--add-bos-token`` puts before a row is not counted, because fairseq does not count it either.
        """
        positions: int = self.decoder.max_positions()
        limit = self.decoder.max_length
        if limit is None:
            return positions
        uncounted_tokens = 1 if self.add_bos_token else 0
        return min(positions, limit - uncounted_tokens)


def has_limited_positions(args: Any, limit: Limit | None) -> bool:
    """Returns whether a flag, the functions or a matrix of learned positions limit the length of rows.

    Without these, positions are encoded by sinusoids, which exist for every position.

    Args:
        args: the flags of the model.
        limit: the longest sentence that the functions take, or None.
    """
    return args.max_target_positions is not None or limit is not None or bool(args.decoder_learned_pos)


def check_embeddings(args: Any) -> None:
    """Checks that the embeddings of input and output can share their weights, if flags ask for that.

    Args:
        args: the flags of the model.

    Raises:
        SynthesizerError: the embeddings that the flags choose cannot share their weights.
    """
    # With an adaptive softmax, fairseq ignores --share-decoder-input-output-embed.
    shares_matrix = args.share_decoder_input_output_embed and not args.adaptive_softmax_cutoff
    if shares_matrix:
        for name in ("adaptive_input", "character_embeddings"):
            if getattr(args, name):
                raise SynthesizerError(
                    f"--share-decoder-input-output-embed: {flag_name(name)} has no one matrix to share with the "
                    "output; leave one of the two out"
                )
    if not args.tie_adaptive_weights:
        return
    if not args.adaptive_input:
        raise SynthesizerError("--tie-adaptive-weights shares weights with --adaptive-input: give that too")
    check_equal(args, "adaptive_input_factor", "adaptive_softmax_factor")
    check_equal(args, "adaptive_input_cutoff", "adaptive_softmax_cutoff")
    check_equal(args, "decoder_input_dim", "decoder_output_dim")


def check_equal(args: Any, input_name: str, output_name: str) -> None:
    """Checks that two settings are equal, which ``--tie-adaptive-weights`` needs; raises SynthesizerError otherwise.

    Args:
        args: the flags of the model.
        input_name: the name of a setting of the input embedding.
        output_name: the name of the same setting of the output layer.
    """
    input_value = getattr(args, input_name)
    output_value = getattr(args, output_name)
    if input_value != output_value:
        input_flag = f"{flag_name(input_name)} {input_value}"
        output_flag = f"{flag_name(output_name)} {output_value}"
        raise SynthesizerError(f"--tie-adaptive-weights: {input_flag} and {output_flag} have to be equal")


def flag_name(name: str) -> str:
    """Returns the flag of a setting: ``adaptive_input`` -> ``--adaptive-input``."""
    return f"--{name.replace('_', '-')}"


def build_embedding(args: Any, dictionary: Any) -> Any:
    """Returns the module that embeds the tokens, of the kind that the flags ask for.

    This is ``--character-embeddings``, ``--adaptive-input``, or else a matrix.

    Args:
        args: the flags of the model.
        dictionary: the tokens.
    """
    if args.character_embeddings:
        return CharacterTokenEmbedder(
            vocab=dictionary,
            filters=ast.literal_eval(args.character_filters),
            char_embed_dim=args.character_embedding_dim,
            word_embed_dim=args.decoder_embed_dim,
            highway_layers=args.char_embedder_highway_layers,
        )
    if args.adaptive_input:
        return AdaptiveInput(
            vocab_size=len(dictionary),
            padding_idx=dictionary.pad(),
            initial_dim=args.decoder_input_dim,
            factor=args.adaptive_input_factor,
            output_dim=args.decoder_embed_dim,
            cutoff=eval_str_list(args.adaptive_input_cutoff, type=int),
            q_noise=args.quant_noise_pq,
            qn_block_size=args.quant_noise_pq_block_size,
        )
    return Embedding(len(dictionary), args.decoder_input_dim, dictionary.pad())
