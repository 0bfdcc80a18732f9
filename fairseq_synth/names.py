"""Names the functions and the architectures, for programs that load neither torch nor fairseq."""

# The rows of the paper's Table 2, then its factorized mixtures. In the name of an architecture "+" becomes "_".
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
    # this project's own, not the paper's
    "relative_random",
    "relative_random+vanilla",
)

# The functions of positions alone whose parameters can be set to get given logits, as when a Transformer is converted.
POSITION_FUNCTIONS = ("random", "relative_random", "factorized_random")


def architecture_name(model: str, spec: str, preset: str) -> str:
    """Returns what ``--arch`` takes for a variant of a model at a size.

    For example, ``architecture_name("transformer_synth", "random+vanilla", "multi30k")`` is
    ``transformer_synth_random_vanilla_multi30k``.
    """
    return f"{model}_{spec.replace('+', '_')}_{preset}"
