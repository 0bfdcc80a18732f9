"""Named architectures: ``transformer_synth_{variant}_{preset}``, every variant of the paper at every size."""

import argparse
from typing import Callable, Dict

from fairseq.models import register_model_architecture
from fairseq.models.transformer import transformer_legacy

from .transformer import SynthesizerTransformer  # noqa: F401  (registers the model the names belong to)

# the rows of the paper's Table 2 and its factorized mixtures; "random+vanilla" is named random_vanilla
VARIANTS = (
    "vanilla",
    "random",
    "fixed_random",
    "factorized_random",
    "dense",
    "factorized_dense",
    "random+dense",
    "dense+vanilla",
    "random+vanilla",
    "factorized_random+dense",
    "factorized_random+vanilla",
)


def multi30k(args: argparse.Namespace) -> None:
    """Transformer-Tiny of Wu et al. 2021 (arXiv 2105.14462), not fairseq's smaller ``transformer_tiny``."""
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 128)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 256)
    args.encoder_layers = getattr(args, "encoder_layers", 4)
    args.encoder_attention_heads = getattr(args, "encoder_attention_heads", 4)
    args.decoder_layers = getattr(args, "decoder_layers", 4)
    args.decoder_attention_heads = getattr(args, "decoder_attention_heads", 4)
    args.dropout = getattr(args, "dropout", 0.3)
    # captions are short: no sentence of the corpus has 100 tokens
    args.synth_max_length = getattr(args, "synth_max_length", 100)
    transformer_legacy.base_architecture(args)


# sizes are fairseq's own of the same name; l = 256 is what fits the paper's parameter counts
PRESETS: Dict[str, Callable[[argparse.Namespace], None]] = {
    "wmt_en_de": transformer_legacy.transformer_wmt_en_de,
    "wmt_en_fr": transformer_legacy.transformer_wmt_en_de,
    "wmt_en_de_big": transformer_legacy.transformer_wmt_en_de_big,
    "iwslt_de_en": transformer_legacy.transformer_iwslt_de_en,
    "multi30k": multi30k,
}


def architecture(spec: str, preset: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """An architecture function: fills in what the command line did not give."""

    def fill(args: argparse.Namespace) -> None:
        args.encoder_synthesizer = getattr(args, "encoder_synthesizer", spec)
        args.decoder_synthesizer = getattr(args, "decoder_synthesizer", spec)
        preset(args)

    return fill


for spec in VARIANTS:
    for preset_name, preset in PRESETS.items():
        name = f"transformer_synth_{spec.replace('+', '_')}_{preset_name}"
        register_model_architecture("transformer_synth", name)(architecture(spec, preset))

# the stock Transformer at the size that fairseq has no name for, to compare with
register_model_architecture("transformer", "transformer_multi30k")(multi30k)
