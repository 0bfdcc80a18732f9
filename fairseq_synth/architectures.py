"""Named architectures: every variant of the paper at every size, for each kind of model.

========================================================  =====================================================
``transformer_synth_{variant}_{preset}``                  translation; `TRANSLATION` has the presets
``transformer_lm_synth_{variant}_{preset}``               language models; `LANGUAGE_MODELS`
``roberta_synth_{variant}_{preset}``                      encoders; `ENCODERS`
``roberta_linformer_{preset}``                            the baseline of `linformer`; `ENCODERS` too
``{lightconv,dynamicconv,transformer_plus}_{preset}``     baselines of text to text; `TEXT_TO_TEXT`
========================================================  =====================================================

A preset sets what the command line did not. Where fairseq has no name for a size, its own model has one here too, to
compare with: ``transformer_multi30k``, ``transformer_lm_ptb``, ``lightconv_lm_ptb``, ``roberta_agnews`` and so on.
"""

import argparse
from collections.abc import Callable
from typing import Any

from fairseq.models import lightconv, lightconv_lm, register_model, register_model_architecture, roberta, transformer_lm
from fairseq.models.transformer import transformer_legacy

from .language_model import SynthesizerLanguageModel
from .linformer import RobertaLinformer
from .names import VARIANTS, architecture_name
from .roberta import SynthesizerRoberta
from .transformer import SynthesizerTransformer

Preset = Callable[[argparse.Namespace], None]


def set_defaults(args: argparse.Namespace, **values: Any) -> None:
    """Sets what is not set."""
    for name, value in values.items():
        setattr(args, name, getattr(args, name, value))


def adapted(preset: Preset, **values: Any) -> Preset:
    """A preset with some other defaults."""

    def fill(args: argparse.Namespace) -> None:
        set_defaults(args, **values)
        preset(args)

    return fill


def sizes(side: str, layers: int, embed_dim: int, ffn_embed_dim: int, heads: int) -> dict[str, int]:
    """The sizes of an encoder or decoder. fairseq gives a decoder the widths of its encoder by default."""
    found = {"layers": layers, "embed_dim": embed_dim, "ffn_embed_dim": ffn_embed_dim, "attention_heads": heads}
    return {f"{side}_{name}": size for name, size in found.items()}


def t5(args: argparse.Namespace) -> None:
    """Layer norm first and tied embeddings, as in T5. Positions are fairseq's sinusoids, which T5 has not."""
    args.encoder_normalize_before = args.decoder_normalize_before = args.share_all_embeddings = True
    transformer_legacy.base_architecture(args)


def widened(preset: Preset) -> Preset:
    """A preset of a Transformer with the parameters of ``random+vanilla``: heads * l^2 more in a layer, in its FFN.

    A width that is given stays: fairseq fills the same arguments in again as it builds or loads a model.
    """

    def fill(args: argparse.Namespace) -> None:
        sides = [side for side in ("encoder", "decoder") if getattr(args, f"{side}_ffn_embed_dim", None) is None]
        preset(args)
        for side in sides:
            heads, dim, inner = (
                getattr(args, f"{side}_{n}") for n in ("attention_heads", "embed_dim", "ffn_embed_dim")
            )
            more = heads * args.synth_max_length**2 / (2 * dim + 1)
            setattr(args, f"{side}_ffn_embed_dim", inner + round(more))

    return fill


def convolutional(kind: str) -> Callable[[Preset], Preset]:
    """fairseq's LightConv (``lightweight``) or DynamicConv (``dynamic``) at the sizes of a Transformer.

    Convolutions of 3, 7, 15 and then 31 tokens, as Wu et al. 2019 have them.
    """

    def of(preset: Preset) -> Preset:
        def fill(args: argparse.Namespace) -> None:
            preset(args)
            args.encoder_conv_type = args.decoder_conv_type = kind  # the parser has set it by now
            for side in ("encoder", "decoder"):
                layers = getattr(args, f"{side}_layers")
                set_defaults(args, **{f"{side}_kernel_size_list": ([3, 7, 15] + [31] * layers)[:layers]})
            lightconv.base_architecture(args)

        return fill

    return of


# the project's own, for Penn Treebank on one CPU thread
PTB = {**sizes("decoder", 2, 128, 512, 4), "dropout": 0.2, "attention_dropout": 0.0, "synth_max_length": 128}


def ptb(args: argparse.Namespace) -> None:
    """`PTB` with input and output embedding tied, where they can be."""
    plain = not (getattr(args, "adaptive_input", False) or getattr(args, "character_embeddings", False))
    set_defaults(args, **PTB, share_decoder_input_output_embed=plain)
    transformer_lm.base_lm_architecture(args)


def lightconv_ptb(args: argparse.Namespace) -> None:
    """fairseq's ``lightconv_lm`` at the sizes of `PTB`, with lightweight convolutions of 15 and 31 tokens.

    Its ``--dropout`` is 0.1 unless given: fairseq's parser has set it by now, as it has set the two flags that are
    overridden here.
    """
    args.share_decoder_input_output_embed, args.decoder_conv_type = True, "lightweight"
    set_defaults(args, **PTB, decoder_kernel_size_list=[15, 31])
    lightconv_lm.base_lm_architecture(args)


def base(args: argparse.Namespace) -> None:
    """RoBERTa's base: 12 layers, 768, 3072, 12 heads, l = 512."""
    set_defaults(args, synth_max_length=512)
    set_defaults(args, max_positions=args.synth_max_length)
    roberta.base_architecture(args)


# text to text: fairseq's own Transformer has these sizes too, and so have the convolutions
TEXT_TO_TEXT: dict[str, Preset] = {
    # Transformer-Tiny of Wu et al. 2021 (arXiv 2105.14462), not fairseq's smaller `transformer_tiny`. Captions are
    # short: no sentence of the corpus has 100 tokens
    "multi30k": adapted(
        transformer_legacy.base_architecture,
        **sizes("encoder", 4, 128, 256, 4),
        decoder_layers=4,
        decoder_attention_heads=4,
        dropout=0.3,
        synth_max_length=100,
    ),
    # the paper's Table 4, and the same for one CPU thread
    "t5_base": adapted(
        t5, **sizes("encoder", 12, 768, 3072, 12), decoder_layers=12, decoder_attention_heads=12, synth_max_length=512
    ),
    "t5_tiny": adapted(
        t5, **sizes("encoder", 2, 128, 512, 4), decoder_layers=2, decoder_attention_heads=4, synth_max_length=128
    ),
}
# sizes are fairseq's own of the same name; l = 256 is what fits the paper's parameter counts
TRANSLATION: dict[str, Preset] = {
    "wmt_en_de": transformer_legacy.transformer_wmt_en_de,
    "wmt_en_fr": transformer_legacy.transformer_wmt_en_de,
    "wmt_en_de_big": transformer_legacy.transformer_wmt_en_de_big,
    "iwslt_de_en": transformer_legacy.transformer_iwslt_de_en,
    **TEXT_TO_TEXT,
}
LANGUAGE_MODELS: dict[str, Preset] = {
    # the paper's base as far as it is known: 6 layers, 512, 2048, 8 heads, untied embeddings
    "lm1b": adapted(transformer_lm.base_lm_architecture, synth_max_length=256),
    # 16 layers, 1024, 4096, 8 heads, adaptive input and softmax
    "wiki103": adapted(transformer_lm.transformer_lm_baevski_wiki103, synth_max_length=512),
    "ptb": ptb,
}
# the project's own too: the paper's Table 7 in small. News in brief have 50 tokens on average
CLASSIFIER = {**sizes("encoder", 2, 128, 512, 4), "attention_dropout": 0.0, "pooler_dropout": 0.1}
ENCODERS: dict[str, Preset] = {
    "base": base,
    "small": adapted(base, **sizes("encoder", 4, 256, 1024, 4)),
    "agnews": adapted(base, **CLASSIFIER, synth_max_length=128),
    "imdb": adapted(base, **CLASSIFIER),
}
# what to compare with: the stock models at the sizes that fairseq has no name for, and Linformer
STOCK: dict[str, dict[str, Preset]] = {
    "transformer": TEXT_TO_TEXT,
    "transformer_lm": {name: LANGUAGE_MODELS[name] for name in ("lm1b", "ptb")},
    "lightconv_lm": {"ptb": lightconv_ptb},
    "roberta": {name: ENCODERS[name] for name in ("small", "agnews", "imdb")},
    "roberta_linformer": ENCODERS,
}
# baselines by the beginning of their names: fairseq's model, and what is made of a preset
BASELINES: dict[str, tuple[str, Callable[[Preset], Preset]]] = {
    "transformer_plus": ("transformer", widened),
    "lightconv": ("lightconv", convolutional("lightweight")),
    "dynamicconv": ("lightconv", convolutional("dynamic")),
}
# the registered models, and the presets of those with synthesized self-attention
MODELS: dict[str, tuple[type[Any], dict[str, Preset]]] = {
    "transformer_synth": (SynthesizerTransformer, TRANSLATION),
    "transformer_lm_synth": (SynthesizerLanguageModel, LANGUAGE_MODELS),
    "roberta_synth": (SynthesizerRoberta, ENCODERS),
    "roberta_linformer": (RobertaLinformer, {}),
}


def register() -> None:
    """Registers the models and all architectures with fairseq. A second call is fairseq's error of a duplicate."""
    for model, (cls, presets) in MODELS.items():
        register_model(model, dataclass=cls.config)(cls)
        for spec in VARIANTS:
            functions = {f"{side}_synthesizer": spec for side in cls.stacks}
            for name, fill in presets.items():
                register_model_architecture(model, architecture_name(model, spec, name))(adapted(fill, **functions))
    for model, presets in STOCK.items():
        for name, fill in presets.items():
            register_model_architecture(model, f"{model}_{name}")(fill)
    for beginning, (model, of) in BASELINES.items():
        for name, fill in TEXT_TO_TEXT.items():
            register_model_architecture(model, f"{beginning}_{name}")(of(fill))
