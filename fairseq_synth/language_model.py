"""Builds language models: fairseq's decoder-only Transformer with synthesized self-attention."""

import ast
from typing import Any

from fairseq.models import FairseqLanguageModel
from fairseq.models.transformer import DEFAULT_MAX_TARGET_POSITIONS, Embedding, TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import eval_str_list

from .config import SYNTHESIZER_FLAGS, check_flags, config_class, flatten, stack_flag, stack_limit
from .errors import SynthesizerError
from .layers import SynthesizerDecoder
from .lengths import announce_limit, check_fusion, check_min_len, check_rows
from .model import SynthesizerModel

# the number of positions for which fairseq computes sinusoids
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
        """Returns the model of a config, see `SynthesizerModel`."""
        args = cls.read_config(cfg, task)
        check_flags(args, *cls.stacks)
        check_embeddings(args)
        limit = stack_limit(args, args.decoder_synthesizer)
        if args.tokens_per_sample is not None:
            check_rows("--tokens-per-sample", args.tokens_per_sample, limit, bool(args.add_bos_token))
        # Positions are limited by a flag, by the functions, or by a matrix of learned positions, but not by sinusoids.
        is_limited = args.max_target_positions is not None or limit is not None or args.decoder_learned_pos
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample or DEFAULT_MAX_TARGET_POSITIONS
        if args.decoder_layers_to_keep:  # as in the build_model of fairseq that this one replaces
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        config = TransformerConfig.from_namespace(args)
        embed_tokens: Any = build_embedding(args, task.source_dictionary)
        model = cls(SynthesizerDecoder(config, task.target_dictionary, embed_tokens, no_encoder_attn=True))
        model.add_bos_token = bool(args.add_bos_token)
        model.takes_longer_rows = not is_limited
        announce_limit(task, limit)
        return model

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Prepares the model for generation or evaluation, as fairseq's own method does.

        From here on rows may be longer than in the training, unless something limits them. Raises SynthesizerError if
        ``--min-len`` is more than the model can write, or if this is the model of ``--lm-path`` and cannot read all
        that the search may write.
        """
        super().prepare_for_inference_(cfg)
        # an evaluation may add the token although the training did not
        self.add_bos_token = self.add_bos_token or bool(getattr(cfg.task, "add_bos_token", False))
        if self.takes_longer_rows:
            self.decoder.max_target_positions = SINUSOIDS
        generation = getattr(cfg, "generation", None)
        check_min_len(generation, self.decoder)
        check_fusion(generation, self.decoder.max_length)

    def max_positions(self) -> int:
        """Returns the longest row in tokens as fairseq counts them: without the token of ``--add-bos-token``."""
        positions: int = self.decoder.max_positions()
        limit = self.decoder.max_length
        if limit is None:
            return positions
        uncounted_tokens = 1 if self.add_bos_token else 0
        return min(positions, limit - uncounted_tokens)


def check_embeddings(args: Any) -> None:
    """Checks that input and output embeddings can share their weights as the flags say.

    Raises SynthesizerError if they cannot.
    """
    for name in ("adaptive_input", "character_embeddings"):
        if args.share_decoder_input_output_embed and getattr(args, name) and not args.adaptive_softmax_cutoff:
            raise SynthesizerError(
                f"--share-decoder-input-output-embed: {flag_name(name)} has no one matrix to share with the output; "
                "leave one of the two out"
            )
    if not args.tie_adaptive_weights:
        return
    if not args.adaptive_input:
        raise SynthesizerError("--tie-adaptive-weights shares weights with --adaptive-input: give that too")
    check_equal(args, "adaptive_input_factor", "adaptive_softmax_factor")
    check_equal(args, "adaptive_input_cutoff", "adaptive_softmax_cutoff")
    check_equal(args, "decoder_input_dim", "decoder_output_dim")


def check_equal(args: Any, input_name: str, output_name: str) -> None:
    """Checks that a setting of the input and one of the output agree, as ``--tie-adaptive-weights`` needs."""
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
    """Returns the embedding of the tokens: ``--character-embeddings``, ``--adaptive-input``, or a plain matrix."""
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
