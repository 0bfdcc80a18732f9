"""Named architectures: every variant of the paper at every size, for each kind of model.

========================================================  =====================================================
``transformer_synth_{variant}_{preset}``                  translation; `TRANSLATION` has the presets
``transformer_lm_synth_{variant}_{preset}``               language models; `LANGUAGE_MODELS`
``roberta_synth_{variant}_{preset}``                      encoders; `ENCODERS`
``roberta_linformer_{preset}``                            the baseline of `linformer`; `ENCODERS` too
``{lightconv,dynamicconv,transformer_plus}_{preset}``     baselines of text to text; `SIZES`
========================================================  =====================================================

A preset sets what the command line did not. Where fairseq has no name for a size, its own model has one here too, to
compare with: ``transformer_multi30k``, ``transformer_lm_ptb``, ``lightconv_lm_ptb``, ``roberta_agnews`` and so on.
"""

import argparse
from typing import Any, Callable, Dict, Tuple, Type

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


def multi30k(args: argparse.Namespace) -> None:
    """Transformer-Tiny of Wu et al. 2021 (arXiv 2105.14462), not fairseq's smaller ``transformer_tiny``."""
    set_defaults(args, encoder_embed_dim=128, encoder_ffn_embed_dim=256, encoder_layers=4, encoder_attention_heads=4)
    set_defaults(args, decoder_layers=4, decoder_attention_heads=4, dropout=0.3)
    set_defaults(args, synth_max_length=100)  # captions are short: no sentence of the corpus has 100 tokens
    transformer_legacy.base_architecture(args)


def t5_base(args: argparse.Namespace) -> None:
    """The paper's Table 4: 12+12 layers, 768, 3072, 12 heads, l = 512; layer norm first, tied embeddings, as in T5.

    Positions are fairseq's sinusoids, which T5 has not.
    """
    set_defaults(args, encoder_layers=12, encoder_embed_dim=768, encoder_ffn_embed_dim=3072, encoder_attention_heads=12)
    set_defaults(args, decoder_layers=12, decoder_attention_heads=12, synth_max_length=512)
    args.encoder_normalize_before = args.decoder_normalize_before = args.share_all_embeddings = True
    transformer_legacy.base_architecture(args)


def t5_tiny(args: argparse.Namespace) -> None:
    """`t5_base` for one CPU thread: 2+2 layers, 128, 512, 4 heads, l = 128."""
    set_defaults(args, encoder_layers=2, encoder_embed_dim=128, encoder_ffn_embed_dim=512, encoder_attention_heads=4)
    set_defaults(args, decoder_layers=2, decoder_attention_heads=4, synth_max_length=128)
    t5_base(args)


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


def lm1b(args: argparse.Namespace) -> None:
    """The paper's base as far as it is known: 6 layers, 512, 2048, 8 heads, l = 256, untied embeddings."""
    set_defaults(args, synth_max_length=256)
    transformer_lm.base_lm_architecture(args)


def wiki103(args: argparse.Namespace) -> None:
    """fairseq's ``transformer_lm_wiki103``: 16 layers, 1024, 4096, 8 heads, adaptive input and softmax; l = 512."""
    set_defaults(args, synth_max_length=512)
    transformer_lm.transformer_lm_baevski_wiki103(args)


def ptb_sizes(args: argparse.Namespace) -> None:
    """For one CPU thread: 2 layers, 128, 512, 4 heads, l = 128, input and output embedding tied, dropout 0.2."""
    set_defaults(args, decoder_layers=2, decoder_embed_dim=128, decoder_ffn_embed_dim=512, decoder_attention_heads=4)
    plain = not (getattr(args, "adaptive_input", False) or getattr(args, "character_embeddings", False))
    set_defaults(args, share_decoder_input_output_embed=plain, dropout=0.2, attention_dropout=0.0, synth_max_length=128)


def ptb(args: argparse.Namespace) -> None:
    """`ptb_sizes` of a Transformer."""
    ptb_sizes(args)
    transformer_lm.base_lm_architecture(args)


def lightconv_ptb(args: argparse.Namespace) -> None:
    """`ptb_sizes` of fairseq's ``lightconv_lm`` with lightweight convolutions of 15 and 31 tokens.

    Its ``--dropout`` is 0.1 unless given: fairseq's parser has set it by now, as it has set the two flags that are
    overridden here.
    """
    ptb_sizes(args)
    args.share_decoder_input_output_embed, args.decoder_conv_type = True, "lightweight"
    set_defaults(args, decoder_kernel_size_list=[15, 31])
    lightconv_lm.base_lm_architecture(args)


def base(args: argparse.Namespace) -> None:
    """RoBERTa's base: 12 layers, 768, 3072, 12 heads, l = 512."""
    set_defaults(args, synth_max_length=512)
    set_defaults(args, max_positions=args.synth_max_length)
    roberta.base_architecture(args)


def small(args: argparse.Namespace) -> None:
    """The project's own: 4 layers, 256, 1024, 4 heads, l = 512."""
    set_defaults(args, encoder_layers=4, encoder_embed_dim=256, encoder_ffn_embed_dim=1024, encoder_attention_heads=4)
    base(args)


def imdb(args: argparse.Namespace) -> None:
    """The project's own, for the paper's Table 7 on a CPU: 2 layers, 128, 512, 4 heads, l = 512."""
    set_defaults(args, encoder_layers=2, encoder_embed_dim=128, encoder_ffn_embed_dim=512, encoder_attention_heads=4)
    set_defaults(args, attention_dropout=0.0, pooler_dropout=0.1)
    base(args)


def agnews(args: argparse.Namespace) -> None:
    """`imdb` with l = 128: news in brief have 50 tokens on average."""
    set_defaults(args, synth_max_length=128)
    imdb(args)


# sizes are fairseq's own of the same name; l = 256 is what fits the paper's parameter counts
TRANSLATION: Dict[str, Preset] = {
    "wmt_en_de": transformer_legacy.transformer_wmt_en_de,
    "wmt_en_fr": transformer_legacy.transformer_wmt_en_de,
    "wmt_en_de_big": transformer_legacy.transformer_wmt_en_de_big,
    "iwslt_de_en": transformer_legacy.transformer_iwslt_de_en,
    "multi30k": multi30k,
    "t5_base": t5_base,
    "t5_tiny": t5_tiny,
}
LANGUAGE_MODELS: Dict[str, Preset] = {"lm1b": lm1b, "wiki103": wiki103, "ptb": ptb}
ENCODERS: Dict[str, Preset] = {"base": base, "small": small, "agnews": agnews, "imdb": imdb}


def architecture(spec: str, sides: Tuple[str, ...], preset: Preset) -> Preset:
    """An architecture function: fills in what the command line did not give."""

    def fill(args: argparse.Namespace) -> None:
        set_defaults(args, **{f"{side}_synthesizer": spec for side in sides})
        preset(args)

    return fill


# what to compare with: the stock models at the sizes that fairseq has no name for, and Linformer
STOCK: Dict[str, Dict[str, Preset]] = {
    "transformer": {"multi30k": multi30k, "t5_base": t5_base, "t5_tiny": t5_tiny},
    "transformer_lm": {"lm1b": lm1b, "ptb": ptb},
    "lightconv_lm": {"ptb": lightconv_ptb},
    "roberta": {"small": small, "agnews": agnews, "imdb": imdb},
    "roberta_linformer": ENCODERS,
}
# baselines by the beginning of their names: fairseq's model, and what is made of a preset in `SIZES`
BASELINES: Dict[str, Tuple[str, Callable[[Preset], Preset]]] = {
    "transformer_plus": ("transformer", widened),
    "lightconv": ("lightconv", convolutional("lightweight")),
    "dynamicconv": ("lightconv", convolutional("dynamic")),
}
SIZES = ("multi30k", "t5_base", "t5_tiny")
# the registered models, and the presets of those with synthesized self-attention
MODELS: Dict[str, Tuple[Type[Any], Dict[str, Preset]]] = {
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
            for name, preset in presets.items():
                fill = architecture(spec, cls.stacks, preset)
                register_model_architecture(model, architecture_name(model, spec, name))(fill)
    for model, presets in STOCK.items():
        for name, preset in presets.items():
            register_model_architecture(model, f"{model}_{name}")(preset)
    for beginning, (model, of) in BASELINES.items():
        for name in SIZES:
            register_model_architecture(model, f"{beginning}_{name}")(of(TRANSLATION[name]))
