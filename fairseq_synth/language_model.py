"""Builds language models: fairseq's decoder-only Transformer with synthesized self-attention."""

import argparse
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
from .lengths import check_and_announce_limit, check_fusion, check_min_len, check_rows
from .model import SynthesizerModel

# The longest row of a model that encodes positions by sinusoids. They exist for every position, so that this is just
# more than any row has.
LONGEST_ROW_WITH_SINUSOIDS = 100_000


class SynthesizerLanguageModel(SynthesizerModel, FairseqLanguageModel):
    """fairseq's ``transformer_lm`` with synthesized self-attention; the token at position t attends up to position t.

    A language model reads the text in rows, which are parts of a certain length.

    Attributes:
        add_bos_token: whether ``--add-bos-token`` puts a token before each row, which fairseq does not count.
        takes_longer_rows: whether rows may be longer in an evaluation than in the training. Both attributes decide how
            long the rows of an evaluation may be; see `max_positions`.
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

    def __init__(self, decoder: SynthesizerDecoder, add_bos_token: bool = False, takes_longer_rows: bool = False):
        """Builds the model around its decoder. The arguments are described at the class."""
        super().__init__(decoder)
        self.add_bos_token = add_bos_token
        self.takes_longer_rows = takes_longer_rows

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SynthesizerLanguageModel":
        """Returns a new model with the settings in a config; see `SynthesizerModel`."""
        args = check_and_parse_flags(cls.read_config(cfg, task), cls.stacks)
        check_embeddings(args)

        # A row is the text that the model reads at once. The functions of the self-attention may limit its length. In
        # the training, rows have --tokens-per-sample tokens, and one more with --add-bos-token.
        limit = stack_limit(args, args.decoder_head_groups)  # None if the functions take rows of any length
        add_bos_token = bool(args.add_bos_token)
        if args.tokens_per_sample is not None:
            check_rows("--tokens-per-sample", args.tokens_per_sample, limit, add_bos_token=add_bos_token)
        # In an evaluation, rows may be longer if nothing in the model has a size for rows of a certain length.
        takes_longer_rows = limit is None and positions_have_no_limit(args)

        model = cls(build_decoder(args, task), add_bos_token=add_bos_token, takes_longer_rows=takes_longer_rows)
        check_and_announce_limit(task, limit)
        return model

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Prepares the model for generation or evaluation in place, as fairseq's own method does.

        This changes the longest row that the model takes (`max_positions`): it counts a token of ``--add-bos-token``,
        and may become longer than in the training. Then the flags of a search are checked.

        Args:
            cfg: fairseq's whole config.

        Raises:
            SynthesizerError: ``--min-len`` is more than the model can write; or ``--lm-path`` names this model, and it
                cannot read the longest sentence that the search may write.
        """
        super().prepare_for_inference_(cfg)
        self.set_longest_row(cfg)
        # The checks read the longest row.
        generation = getattr(cfg, "generation", None)  # the flags of the search
        check_min_len(generation, self.decoder)
        check_fusion(generation, self.decoder)

    def set_longest_row(self, cfg: Any) -> None:
        """Sets the attributes on which `max_positions` depends, for an evaluation.

        Args:
            cfg: fairseq's whole config.
        """
        if getattr(cfg.task, "add_bos_token", False):
            self.add_bos_token = True  # An evaluation may have the flag although the training did not.
        if self.takes_longer_rows:
            # With sinusoids, there is a position for every token of a row, however long it is.
            self.decoder.max_target_positions = LONGEST_ROW_WITH_SINUSOIDS

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


def build_decoder(args: argparse.Namespace, task: Any) -> SynthesizerDecoder:
    """Returns the decoder of a language model, which has no attention to an encoder.

    Args:
        args: the flags of the model, as `check_and_parse_flags` returns them.
        task: fairseq's task, which has the dictionaries.
    """
    embed_tokens = build_embedding(args, task.source_dictionary)
    return SynthesizerDecoder(decoder_config(args), task.target_dictionary, embed_tokens, no_encoder_attn=True)


def positions_have_no_limit(args: argparse.Namespace) -> bool:
    """Returns whether the model has an encoding for every position, however long a row is.

    This is so with sinusoids, unless a flag limits the positions. Learned positions have a matrix of a certain size.

    Args:
        args: the flags of the model as the user has set them.
    """
    has_sinusoids = not args.decoder_learned_pos
    has_limit = args.max_target_positions is not None
    return has_sinusoids and not has_limit


def decoder_config(args: argparse.Namespace) -> TransformerConfig:
    """Returns fairseq's config of the decoder.

    Two settings may differ from those in `args`, as in the ``build_model`` of fairseq's own language model: the number
    of positions and the number of layers.

    Args:
        args: the flags of the model, which stay as they are.
    """
    settings = argparse.Namespace(**vars(args))  # a copy
    if settings.max_target_positions is None:
        settings.max_target_positions = settings.tokens_per_sample or DEFAULT_MAX_TARGET_POSITIONS
    if settings.decoder_layers_to_keep:  # such as "0,2"
        settings.decoder_layers = len(settings.decoder_layers_to_keep.split(","))
    return TransformerConfig.from_namespace(settings)


def check_embeddings(args: argparse.Namespace) -> None:
    """Checks that the embeddings of input and output can share their weights, if flags ask for that.

    Args:
        args: the flags of the model.

    Raises:
        SynthesizerError: the embeddings that the flags choose cannot share their weights.
    """
    check_shared_matrix(args)
    check_tied_adaptive_weights(args)


def check_shared_matrix(args: argparse.Namespace) -> None:
    """Raises SynthesizerError if ``--share-decoder-input-output-embed`` is given and the input has no single matrix."""
    # With an adaptive softmax, fairseq ignores the flag.
    shares_matrix = args.share_decoder_input_output_embed and not args.adaptive_softmax_cutoff
    if not shares_matrix:
        return
    for name in ("adaptive_input", "character_embeddings"):
        if getattr(args, name):
            raise SynthesizerError(
                f"--share-decoder-input-output-embed: {flag_name(name)} has no single matrix to share with the output; "
                "remove one of the two flags"
            )


def check_tied_adaptive_weights(args: argparse.Namespace) -> None:
    """Raises SynthesizerError if ``--tie-adaptive-weights`` is given, but input and output differ in their sizes."""
    if not args.tie_adaptive_weights:
        return
    if not args.adaptive_input:
        raise SynthesizerError("--tie-adaptive-weights: needs --adaptive-input; add it")
    check_equal(args, "adaptive_input_factor", "adaptive_softmax_factor")
    check_equal(args, "adaptive_input_cutoff", "adaptive_softmax_cutoff")
    check_equal(args, "decoder_input_dim", "decoder_output_dim")


def check_equal(args: argparse.Namespace, input_name: str, output_name: str) -> None:
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
        raise SynthesizerError(f"--tie-adaptive-weights: {input_flag} and {output_flag} must be equal")


def flag_name(name: str) -> str:
    """Returns the flag of a setting: ``adaptive_input`` -> ``--adaptive-input``."""
    return f"--{name.replace('_', '-')}"


def build_embedding(args: argparse.Namespace, dictionary: Any) -> Any:
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
