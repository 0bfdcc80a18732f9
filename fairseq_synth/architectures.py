"""Registers the named architectures: every variant of the paper at every size, for each kind of model.

========================================================  =====================================================
``transformer_synth_{variant}_{preset}``                  translation; `TRANSLATION` has the presets
``transformer_lm_synth_{variant}_{preset}``               language models; `LANGUAGE_MODELS`
``roberta_synth_{variant}_{preset}``                      encoders; `ENCODERS`
``roberta_linformer_{preset}``                            the baseline of `linformer`; `ENCODERS` too
``{lightconv,dynamicconv,transformer_plus}_{preset}``     baselines of text to text; `TEXT_TO_TEXT`
========================================================  =====================================================

A *preset* is a function that sets the sizes of a model: every flag that the command line has not set. If fairseq has no
name for a size, its own model gets one here too, as a baseline: ``transformer_multi30k``, ``transformer_lm_ptb``,
``lightconv_lm_ptb``, ``roberta_agnews`` and so on.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    lightconv,
    lightconv_lm,
    register_model,
    register_model_architecture,
    roberta,
    transformer_lm,
)
from fairseq.models.transformer import transformer_legacy

from .language_model import SynthesizerLanguageModel
from .linformer import RobertaLinformer
from .names import VARIANTS, architecture_name
from .roberta import SynthesizerRoberta
from .transformer import SynthesizerTransformer

# A preset gives values to the flags that the command line has not set, by changing the namespace of flags in place.
# fairseq calls it before it builds a model.
Preset = Callable[[argparse.Namespace], None]


def set_defaults(args: argparse.Namespace, **values: Any) -> None:
    """Gives each of these flags its value in `args`, unless it has one already."""
    for name, value in values.items():
        if not hasattr(args, name):
            setattr(args, name, value)


def adapt(preset: Preset, **values: Any) -> Preset:
    """Returns a preset that gives some flags other values than `preset` does.

    It sets these flags first, because `preset` does not change a flag that is set.
    """

    def adapted_preset(args: argparse.Namespace) -> None:
        set_defaults(args, **values)
        preset(args)

    return adapted_preset


def stack_sizes(stack: str, layers: int, embed_dim: int, ffn_embed_dim: int, heads: int) -> dict[str, int]:
    """Returns {flag: value} for the sizes of a stack, ``encoder`` or ``decoder``.

    If a decoder has no sizes, fairseq gives it the widths of its encoder.
    """
    return {
        f"{stack}_layers": layers,
        f"{stack}_embed_dim": embed_dim,
        f"{stack}_ffn_embed_dim": ffn_embed_dim,
        f"{stack}_attention_heads": heads,
    }


def fill_t5(args: argparse.Namespace) -> None:
    """Fills in fairseq's Transformer with layer norm before each block and tied embeddings, as in T5.

    Unlike T5, it encodes positions by fairseq's sinusoids.
    """
    args.encoder_normalize_before = True
    args.decoder_normalize_before = True
    args.share_all_embeddings = True
    transformer_legacy.base_architecture(args)


def widen(preset: Preset) -> Preset:
    """Returns a preset of a stock Transformer with as many parameters as a Synthesizer, ``random+vanilla``, has.

    Its feed-forward networks are wider than in `preset`, unless the user has set their width.
    """

    def widened_preset(args: argparse.Namespace) -> None:
        """Calls `preset`, and then widens the feed-forward networks of the stacks whose width was not set before.

        fairseq may call a preset twice on the same flags. In the second call, all widths are set, so nothing is widened
        again.
        """
        stacks_without_width = [stack for stack in ("encoder", "decoder") if not has_width(args, stack)]
        preset(args)  # This sets all widths.
        for stack in stacks_without_width:
            widen_feed_forward(args, stack)

    return widened_preset


def has_width(args: argparse.Namespace, stack: str) -> bool:
    """Returns whether the width of the feed-forward networks of a stack is set."""
    return getattr(args, f"{stack}_ffn_embed_dim", None) is not None


def widen_feed_forward(args: argparse.Namespace, stack: str) -> None:
    """Adds as many parameters to the feed-forward networks of a stack as R of ``random`` has; changes `args` in place.

    In a layer, R has a matrix of l x l for each head.
    """
    heads = getattr(args, f"{stack}_attention_heads")
    embed_dim = getattr(args, f"{stack}_embed_dim")
    ffn_embed_dim = getattr(args, f"{stack}_ffn_embed_dim")
    parameters_of_r = heads * args.synth_max_length**2
    parameters_per_unit = 2 * embed_dim + 1  # a column of the first matrix, a row of the second, and a bias
    setattr(args, f"{stack}_ffn_embed_dim", ffn_embed_dim + round(parameters_of_r / parameters_per_unit))


def make_lightconv(preset: Preset) -> Preset:
    """Returns a preset of fairseq's LightConv at the sizes of a Transformer's."""
    return make_convolutional(preset, "lightweight")


def make_dynamicconv(preset: Preset) -> Preset:
    """Returns a preset of fairseq's DynamicConv at the sizes of a Transformer's."""
    return make_convolutional(preset, "dynamic")


def make_convolutional(preset: Preset, conv_type: str) -> Preset:
    """Returns a preset of fairseq's convolutional model at the sizes that `preset` gives a Transformer.

    Args:
        preset: a preset of a Transformer.
        conv_type: ``lightweight`` or ``dynamic``.
    """

    def convolutional_preset(args: argparse.Namespace) -> None:
        """Sets the sizes of the Transformer, then the flags that only the convolutional model has."""
        preset(args)
        # fairseq's parser has set these two flags to its default already.
        args.encoder_conv_type = conv_type
        args.decoder_conv_type = conv_type
        set_convolution_widths(args)  # for the numbers of layers that the preset has set
        # This comes last, because it sets all flags of the model that are not set yet.
        lightconv.base_architecture(args)

    return convolutional_preset


def set_convolution_widths(args: argparse.Namespace) -> None:
    """Sets the width of the convolution in each layer, unless the user has given the widths.

    Args:
        args: the flags, which are changed. The numbers of layers are set already.
    """
    set_defaults(
        args,
        encoder_kernel_size_list=convolution_widths(args.encoder_layers),
        decoder_kernel_size_list=convolution_widths(args.decoder_layers),
    )


def convolution_widths(num_layers: int) -> list[int]:
    """Returns the width in tokens of each layer's convolution: 3, 7, 15 and from then on 31, as in Wu et al. 2019."""
    widths_of_first_layers = [3, 7, 15][:num_layers]
    num_other_layers = num_layers - len(widths_of_first_layers)
    return widths_of_first_layers + [31] * num_other_layers


# the project's own sizes for Penn Treebank, on one CPU thread
PTB = {**stack_sizes("decoder", 2, 128, 512, 4), "dropout": 0.2, "attention_dropout": 0.0, "synth_max_length": 128}


def fill_ptb(args: argparse.Namespace) -> None:
    """Fills in the sizes for Penn Treebank, and ties input and output embeddings.

    They cannot be tied if the input embedding is no single matrix: with adaptive inputs or character embeddings.
    """
    is_adaptive = getattr(args, "adaptive_input", False)
    has_characters = getattr(args, "character_embeddings", False)
    set_defaults(args, **PTB, share_decoder_input_output_embed=not (is_adaptive or has_characters))
    transformer_lm.base_lm_architecture(args)


def fill_lightconv_ptb(args: argparse.Namespace) -> None:
    """Fills in fairseq's ``lightconv_lm`` at the sizes for Penn Treebank, with convolutions of 15 and 31 tokens.

    fairseq's parser has set some flags to its defaults by now. Two of them are overridden here. ``--dropout`` is not,
    so that it is 0.1 unless the command line gives it.
    """
    args.share_decoder_input_output_embed = True
    args.decoder_conv_type = "lightweight"
    set_defaults(args, **PTB, decoder_kernel_size_list=[15, 31])
    lightconv_lm.base_lm_architecture(args)


def fill_base(args: argparse.Namespace) -> None:
    """Fills in RoBERTa's base model: 12 layers of width 768 and 3072 with 12 heads, for up to 512 tokens."""
    set_defaults(args, synth_max_length=512)
    set_defaults(args, max_positions=args.synth_max_length)
    roberta.base_architecture(args)


# sizes for text to text, which fairseq's own Transformer and the convolutions have too
TEXT_TO_TEXT: dict[str, Preset] = {
    # Transformer-Tiny of Wu et al. 2021 (arXiv 2105.14462), not fairseq's smaller `transformer_tiny`. Captions are
    # short: no sentence of the corpus has 100 tokens
    "multi30k": adapt(
        transformer_legacy.base_architecture,
        **stack_sizes("encoder", 4, 128, 256, 4),
        decoder_layers=4,
        decoder_attention_heads=4,
        dropout=0.3,
        synth_max_length=100,
    ),
    # the paper's Table 4, and the same for one CPU thread
    "t5_base": adapt(
        fill_t5,
        **stack_sizes("encoder", 12, 768, 3072, 12),
        decoder_layers=12,
        decoder_attention_heads=12,
        synth_max_length=512,
    ),
    "t5_tiny": adapt(
        fill_t5,
        **stack_sizes("encoder", 2, 128, 512, 4),
        decoder_layers=2,
        decoder_attention_heads=4,
        synth_max_length=128,
    ),
}
# Sizes are those of fairseq's architectures of the same names. l = 256 fits the paper's parameter counts.
TRANSLATION: dict[str, Preset] = {
    "wmt_en_de": transformer_legacy.transformer_wmt_en_de,
    "wmt_en_fr": transformer_legacy.transformer_wmt_en_de,
    "wmt_en_de_big": transformer_legacy.transformer_wmt_en_de_big,
    "iwslt_de_en": transformer_legacy.transformer_iwslt_de_en,
    **TEXT_TO_TEXT,
}
LANGUAGE_MODELS: dict[str, Preset] = {
    # the paper's base model, as far as it is known: 6 layers, 512, 2048, 8 heads, untied embeddings
    "lm1b": adapt(transformer_lm.base_lm_architecture, synth_max_length=256),
    # 16 layers, 1024, 4096, 8 heads, adaptive input and softmax
    "wiki103": adapt(transformer_lm.transformer_lm_baevski_wiki103, synth_max_length=512),
    "ptb": fill_ptb,
}
# the project's own sizes for the paper's Table 7 in small; a text of AG News has 50 tokens on average
CLASSIFIER = {**stack_sizes("encoder", 2, 128, 512, 4), "attention_dropout": 0.0, "pooler_dropout": 0.1}
ENCODERS: dict[str, Preset] = {
    "base": fill_base,
    "small": adapt(fill_base, **stack_sizes("encoder", 4, 256, 1024, 4)),
    "agnews": adapt(fill_base, **CLASSIFIER, synth_max_length=128),
    "imdb": adapt(fill_base, **CLASSIFIER),
}
# {the name of a baseline's model: its presets}: stock models at the sizes for which fairseq has no name, and Linformer
STOCK: dict[str, dict[str, Preset]] = {
    "transformer": TEXT_TO_TEXT,
    "transformer_lm": {name: LANGUAGE_MODELS[name] for name in ("lm1b", "ptb")},
    "lightconv_lm": {"ptb": fill_lightconv_ptb},
    "roberta": {name: ENCODERS[name] for name in ("small", "agnews", "imdb")},
    "roberta_linformer": ENCODERS,
}


class Baseline(NamedTuple):
    """A model of fairseq that is compared with the Synthesizers, at the same sizes."""

    model: str
    adapt: Callable[[Preset], Preset]  # makes a preset of this model of a preset of the Transformer


class Kind(NamedTuple):
    """A registered model, and the presets for which its variants with synthesized self-attention are registered."""

    model: type[Any]
    presets: dict[str, Preset]


# {the beginning of the architecture's name: the baseline}
BASELINES = {
    "transformer_plus": Baseline("transformer", widen),
    "lightconv": Baseline("lightconv", make_lightconv),
    "dynamicconv": Baseline("lightconv", make_dynamicconv),
}
# {the name under which fairseq knows the model: the model and its presets}
MODELS = {
    "transformer_synth": Kind(SynthesizerTransformer, TRANSLATION),
    "transformer_lm_synth": Kind(SynthesizerLanguageModel, LANGUAGE_MODELS),
    "roberta_synth": Kind(SynthesizerRoberta, ENCODERS),
    "roberta_linformer": Kind(RobertaLinformer, {}),
}


def register() -> None:
    """Registers the models and all architectures with fairseq.

    A second call registers the same again. If this module was reloaded in between, the new classes take the place of
    the old ones.
    """
    # fairseq refuses to register a name twice.
    forget_earlier_registration()
    for model_name, kind in MODELS.items():
        # `register_model` returns a decorator, which is applied to the class here.
        register_with_fairseq = register_model(model_name, dataclass=kind.model.config)
        register_with_fairseq(kind.model)
        for variant in VARIANTS:
            register_variant(model_name, kind, variant)
    register_baselines()


def register_variant(model_name: str, kind: Kind, variant: str) -> None:
    """Registers an architecture for each preset of a model, with the functions of a variant in all stacks.

    Args:
        model_name: the name under which fairseq knows the model.
        kind: the model and its presets.
        variant: the functions, such as ``random+vanilla``.
    """
    function_flags = {f"{stack}_synthesizer": variant for stack in kind.model.stacks}
    for preset_name, preset in kind.presets.items():
        name = architecture_name(model_name, variant, preset_name)
        register_preset = register_model_architecture(model_name, name)  # fairseq's decorator of a preset
        register_preset(adapt(preset, **function_flags))


def register_baselines() -> None:
    """Registers the architectures without synthesized attention."""
    for model_name, presets in STOCK.items():
        for preset_name, preset in presets.items():
            register_preset = register_model_architecture(model_name, f"{model_name}_{preset_name}")
            register_preset(preset)
    for prefix, baseline in BASELINES.items():
        for preset_name, preset in TEXT_TO_TEXT.items():
            register_preset = register_model_architecture(baseline.model, f"{prefix}_{preset_name}")
            register_preset(baseline.adapt(preset))


def forget_earlier_registration() -> None:
    """Removes from fairseq the models and architectures that this package has registered in an earlier call.

    A program may call `register` twice, and a notebook may reload the package. If another package has registered one
    of the names, its model stays, and fairseq raises its error about a duplicate.
    """
    model_names = {name for name, model in MODEL_REGISTRY.items() if is_of_this_package(model)}
    named_architectures = {name for name, preset in ARCH_CONFIG_REGISTRY.items() if is_of_this_package(preset)}
    # fairseq also registers an architecture under the name of each model, with a preset of fairseq.
    architectures_of_models = model_names
    for name in model_names:
        forget_model(name)
    for name in named_architectures | architectures_of_models:
        forget_architecture(name)


def forget_model(name: str) -> None:
    """Removes a model from the two registries that fairseq has for models."""
    del MODEL_REGISTRY[name]  # {name of a model: its class}
    del MODEL_DATACLASS_REGISTRY[name]  # {name of a model: the dataclass of its flags}


def forget_architecture(name: str) -> None:
    """Removes an architecture from the four registries that fairseq has for architectures."""
    model_name = ARCH_MODEL_NAME_REGISTRY.pop(name)  # {name of an architecture: name of its model}
    ARCH_MODEL_INV_REGISTRY[model_name].remove(name)  # {name of a model: names of its architectures}
    del ARCH_MODEL_REGISTRY[name]  # {name of an architecture: class of its model}
    del ARCH_CONFIG_REGISTRY[name]  # {name of an architecture: its preset}


def is_of_this_package(definition: Any) -> bool:
    """Returns whether a class or function is defined in this package."""
    package = __name__.partition(".")[0]
    return definition.__module__.partition(".")[0] == package
