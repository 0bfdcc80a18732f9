"""Language models: fairseq's decoder-only Transformer with synthesized self-attention."""

import ast
from typing import Any

from fairseq.models import FairseqLanguageModel
from fairseq.models.transformer import DEFAULT_MAX_TARGET_POSITIONS, Embedding, TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import eval_str_list

from .config import SYNTHESIZER_FLAGS, check_flags, config_class, flatten, limit_of, stack_flag
from .errors import SynthesizerError
from .layers import SynthesizerDecoder
from .lengths import announce_limit, check_fusion, check_min_len, check_rows
from .model import SynthesizerModel


class SynthesizerLanguageModel(SynthesizerModel, FairseqLanguageModel):
    """fairseq's ``transformer_lm`` with synthesized self-attention: row t of a block sees the tokens up to t."""

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
    takes_longer_rows = False  # than those of the training

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SynthesizerLanguageModel":
        """Builds the model of a config, see `SynthesizerModel`."""
        args = cls.read_config(cfg, task)
        check_flags(args, *cls.stacks)
        check_embeddings(args)
        limit = limit_of(args, args.decoder_synthesizer)
        if args.tokens_per_sample is not None:
            check_rows("--tokens-per-sample", args.tokens_per_sample, limit, bool(args.add_bos_token))
        takes_longer_rows = args.max_target_positions is None and limit is None and not args.decoder_learned_pos
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample or DEFAULT_MAX_TARGET_POSITIONS
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
        """As fairseq's own. From here on rows may be longer than the training's, where nothing limits them.

        Raises SynthesizerError if ``--min-len`` is more than the model can write, or if as the model of ``--lm-path``
        it cannot read all that a search may write.
        """
        super().prepare_for_inference_(cfg)
        # an evaluation may add the token where the training has not
        self.add_bos_token = self.add_bos_token or bool(getattr(cfg.task, "add_bos_token", False))
        if self.takes_longer_rows:
            self.decoder.max_target_positions = int(1e5)  # the limit of fairseq's sinusoids
        generation = getattr(cfg, "generation", None)
        check_min_len(generation, self.decoder)
        check_fusion(generation, self.decoder.max_length)

    def max_positions(self) -> int:
        """Longest row in tokens as fairseq counts it: without the one that ``--add-bos-token`` puts before."""
        length = self.decoder.max_length
        most: int = self.decoder.max_positions()
        return most if length is None else min(most, length - self.add_bos_token)


def check_embeddings(args: Any) -> None:
    """Raises SynthesizerError if the weights of input and output cannot be shared as the flags say."""
    for flag in ("adaptive_input", "character_embeddings"):
        if args.share_decoder_input_output_embed and getattr(args, flag) and not args.adaptive_softmax_cutoff:
            raise SynthesizerError(
                f"--share-decoder-input-output-embed: --{flag.replace('_', '-')} has no one matrix to share with the "
                "output; leave one of the two out"
            )
    if not args.tie_adaptive_weights:
        return
    if not args.adaptive_input:
        raise SynthesizerError("--tie-adaptive-weights shares weights with --adaptive-input: give that too")
    for one, other in (
        ("adaptive_input_factor", "adaptive_softmax_factor"),
        ("adaptive_input_cutoff", "adaptive_softmax_cutoff"),
        ("decoder_input_dim", "decoder_output_dim"),
    ):
        values = [getattr(args, name) for name in (one, other)]
        if values[0] != values[1]:
            flags = [f"--{name.replace('_', '-')} {value}" for name, value in zip((one, other), values)]
            raise SynthesizerError(f"--tie-adaptive-weights: {' and '.join(flags)} have to be equal")


def build_embedding(args: Any, dictionary: Any) -> Any:
    """The tokens' embedding: plain, ``--adaptive-input``, or ``--character-embeddings``."""
    if args.character_embeddings:
        filters = ast.literal_eval(args.character_filters)
        width, highways = args.decoder_embed_dim, args.char_embedder_highway_layers
        return CharacterTokenEmbedder(dictionary, filters, args.character_embedding_dim, width, highways)
    if args.adaptive_input:
        return AdaptiveInput(
            len(dictionary),
            dictionary.pad(),
            args.decoder_input_dim,
            args.adaptive_input_factor,
            args.decoder_embed_dim,
            eval_str_list(args.adaptive_input_cutoff, type=int),
            args.quant_noise_pq,
            args.quant_noise_pq_block_size,
        )
    return Embedding(len(dictionary), args.decoder_input_dim, dictionary.pad())
