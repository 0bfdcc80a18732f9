"""Which checkpoints an attention takes, and how it starts from a stock Transformer."""

import logging
import re
from collections.abc import Iterable

from torch import Tensor

from .errors import SynthesizerError
from .synthesizers import LayerSynthesizer

logger = logging.getLogger(__name__)


def adapt_checkpoint(state_dict: dict[str, Tensor], prefix: str, synthesizer: LayerSynthesizer) -> None:
    """Checks a checkpoint against an attention's synthesizer, or starts that from a stock Transformer.

    A stock checkpoint has no ``synthesizer.*``: the logits of functions beside ``vanilla`` become 0, so that
    ``--synth-mixture sum`` starts with the stock model's output (``fixed_random`` stays as drawn).

    Args:
        state_dict: the checkpoint's weights; completed in place for a stock checkpoint.
        prefix: the attention's, with the dot.

    Raises:
        SynthesizerError: the checkpoint holds other functions, or other sizes of the same ones.
    """
    name, own_prefix = prefix.rstrip("."), f"{prefix}synthesizer."
    if not any(key.startswith(prefix) for key in state_dict):
        return  # another model altogether: strict loading lists what is missing
    own = synthesizer.state_dict()
    theirs = {key[len(own_prefix) :]: value for key, value in state_dict.items() if key.startswith(own_prefix)}
    has_query = f"{prefix}q_proj.weight" in state_dict
    if is_folded(theirs) and not is_folded(own):
        raise SynthesizerError(
            f"{name}: these are weights of a model prepared for generation, which no other model can take; load "
            "the checkpoint itself"
        )
    if is_folded(own) and not is_folded(theirs):
        raise SynthesizerError(
            f"{name}: this model is prepared for generation and takes no weights of a training; load them into a "
            "new model"
        )
    if has_query and not theirs:
        start_from_dot_product(state_dict, prefix, synthesizer)
    else:
        check_functions(prefix, synthesizer, theirs, has_query)


def check_functions(prefix: str, synthesizer: LayerSynthesizer, theirs: dict[str, Tensor], has_query: bool) -> None:
    """Raises SynthesizerError if a checkpoint's state dict of the synthesizer, `theirs`, does not fit this one's."""
    name, own = prefix.rstrip("."), synthesizer.state_dict()
    trained, present = functions_of(theirs), functions_of(own)
    if trained != present or has_query != any(mixture.reads_query_key for mixture in synthesizer.mixtures()):
        raise SynthesizerError(
            f"{name}: the checkpoint has weights of {' and '.join(sorted(trained)) or 'no function'}, and "
            f"{'query and key projections' if has_query else 'no query and key projections'}; this model has "
            f"{' and '.join(names_of(synthesizer))}; {functions_of_the_training(name)}"
        )
    weighted = {key for key in theirs if key.endswith("alpha")}
    if weighted != {key for key in own if key.endswith("alpha")}:
        raise SynthesizerError(
            f"{name}: the checkpoint was trained with --synth-mixture {'convex' if weighted else 'sum'}; give that"
        )
    for key, value in own.items():
        if key in theirs and theirs[key].shape != value.shape:
            raise SynthesizerError(
                f"{prefix}synthesizer.{key} is {tuple(theirs[key].shape)} in the checkpoint and "
                f"{tuple(value.shape)} in this model; give the --synth-max-length, --synth-rank and attention "
                "heads of the training"
            )


def start_from_dot_product(state_dict: dict[str, Tensor], prefix: str, synthesizer: LayerSynthesizer) -> None:
    """Completes the state dict of a stock attention with functions beside ``vanilla`` whose logits are 0.

    Raises SynthesizerError if the attention has no dot product, or other functions in some heads.
    """
    name, functions = prefix.rstrip("."), " and ".join(names_of(synthesizer))
    if len(synthesizer.mixtures()) > 1:
        if not synthesizer.state_dict():
            return
        raise SynthesizerError(
            f"{name}: the checkpoint has dot-product attention in all heads, this model has heads of several "
            f"kinds; {functions_of_the_training(name)}"
        )
    (mixture,) = synthesizer.mixtures()
    if not mixture.reads_query_key:
        raise SynthesizerError(
            f"{name}: the checkpoint has dot-product attention in this layer, this model has {functions}; "
            f"{functions_of_the_training(name)} (only vanilla and mixtures with it can start from a stock "
            "Transformer)"
        )
    if not synthesizer.state_dict():
        return
    logger.info(f"{name}: starting {functions} from the weights of dot-product attention")
    if mixture.alpha is not None:
        logger.warning(
            f"{name}: --synth-mixture convex scales the logits of the checkpoint down; --synth-mixture sum "
            "starts with its output"
        )
    for function, component in mixture.components.items():
        component.zero_logits_()  # type: ignore[operator]
        if not component.reads_query_key and not component.is_trained():  # type: ignore[operator]
            logger.warning(f"{name}: {function} is not trained, so its logits stay: the output changes")
    for key, value in synthesizer.state_dict().items():
        state_dict[f"{prefix}synthesizer.{key}"] = value.clone()


def names_of(synthesizer: LayerSynthesizer) -> list[str]:
    """The functions of a layer; where it has several groups of heads, each with its group."""
    groups = [list(mixture.components) for mixture in synthesizer.mixtures()]
    if len(groups) == 1:
        return groups[0]
    return [of_group(name, i) for i, names in enumerate(groups) for name in names]


def of_group(name: str, group: int) -> str:
    """How a message names a function of one group of heads, counted from 0."""
    return f"{name} (group {group + 1} of the heads)"


def functions_of_the_training(name: str) -> str:
    """What to do about other functions in the checkpoint, where `name` is an attention's place in the model."""
    side = name.split(".")[0]
    sides = [side] if side in ("encoder", "decoder") else ["encoder", "decoder"]
    return f"give the {' and '.join(f'--{side}-synthesizer' for side in sides)} of the training"


def is_folded(keys: Iterable[str]) -> bool:
    """Whether a synthesizer's state dict is of a model prepared for generation; see `Mixture.fold_weights_`."""
    return any(key.split(".")[-1] == "folded" for key in keys)


def functions_of(keys: Iterable[str]) -> set[str]:
    """The functions that have weights in a synthesizer's state dict, named as in `names_of`."""
    found = (re.match(r"(?:groups\.(\d+)\.)?components\.(\w+)\.", key) for key in keys)
    return {of_group(match[2], int(match[1])) if match[1] else match[2] for match in found if match}
