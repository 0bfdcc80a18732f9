"""Repairs of ``--store-ema``, the exponential moving average of the weights."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import fairseq.checkpoint_utils
from fairseq.models.ema.ema import EMA
from fairseq.trainer import Trainer
from torch import Tensor

from ..repairs import repair


@repair(
    "_step_internal",
    EMA,
    symptom="`--store-ema` updates the averages of tied weights more than once, as with `--share-all-embeddings`",
    versions="all versions",
)
def average_tied_weights_once(original: Callable[..., Any], self: EMA, new_model: Any, updates: Any = None) -> None:
    """Replaces ``EMA._step_internal`` (``original``): updates each average only once.

    With ``--store-ema``, fairseq keeps an exponential moving average of each weight. This method updates the averages,
    weight by weight. With ``--share-all-embeddings``, "encoder.embed_tokens.weight" and "decoder.embed_tokens.weight"
    are two names of one weight, and usually also of one average. fairseq updates this average under both names, and so
    twice. The replacement leaves out the second name.

    Args:
        original: fairseq's method.
        self: the averages.
        new_model: the model after the update.
        updates: the number of updates.
    """
    averages = get_moved_averages(self)  # {name of a weight: its average}
    repeated_names = find_repeated_names(averages)  # {"decoder.embed_tokens.weight"} in the example
    weights = {name: weight for name, weight in new_model.state_dict().items() if name not in repeated_names}
    # fairseq's method only calls `state_dict` of the model. So an object with this method is enough.
    original(self, ModelWithStateDict(weights), updates)


def get_moved_averages(ema: EMA) -> dict[str, Tensor]:
    """Returns {name of a weight: its average} for the averages that ``EMA._step_internal`` updates."""
    if ema.config.ema_fp32:
        # The averages are kept in fp32. For a model in fp16 or bf16, each name then has an average of its own, even if
        # two names belong to one weight.
        return ema.fp32_params
    return ema.model.state_dict()  # The model of the averages is a copy of the trained model.


class ModelWithStateDict:
    """Takes the place of a model. It has just one method, which returns some weights."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the weights."""
        return self.weights


def find_repeated_names(state_dict: dict[str, Tensor]) -> set[str]:
    """Returns the names of all tensors that have an earlier name, too.

    Two names belong to the same tensor if the memory and the shape are the same.
    """
    repeated_names: set[str] = set()
    known_tensors: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in state_dict.items():
        memory_and_shape = (tensor.data_ptr(), tuple(tensor.shape))
        if memory_and_shape in known_tensors:
            repeated_names.add(name)
        known_tensors.add(memory_and_shape)
    return repeated_names


@repair(
    "restore",
    EMA,
    symptom="`--store-ema` loses the last layer norm with `--encoder-normalize-before`, and likewise in the decoder",
    versions="all versions",
)
def keep_final_norm_under_ema(
    original: Callable[..., Any], self: EMA, state_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Replaces ``EMA.restore`` (``original``): adds the model's version numbers to the averages that are loaded.

    A state dict of fairseq has entries such as "decoder.version", which mark the format of the weights. ``--store-ema``
    does not average them. fairseq takes weights without a version for an old format that has no layer norm at the end,
    and removes this layer norm from the model.
    """
    versions = {name: value for name, value in self.model.state_dict().items() if name.endswith(".version")}
    original(self, {**versions, **state_dict}, *args, **kwargs)


@repair(
    "load_checkpoint",
    Trainer,
    symptom="`--store-ema` with `--finetune-from-model` fails with a KeyError",
    versions="all versions",
)
def begin_averages_with_weights(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Trainer.load_checkpoint`` (``original``): loads a checkpoint that has no averages of ``--store-ema``.

    For example, the checkpoint of ``--finetune-from-model`` may have none. Then fairseq tries to start the averages
    from the weights of the checkpoint. But it has removed the weights from the loaded checkpoint by then, so a KeyError
    follows. The replacement adds a copy of the weights to the checkpoint, in the place of the averages.
    """
    if not self.cfg.ema.store_ema:
        return original(self, *args, **kwargs)
    with checkpoints_have_averages():
        return original(self, *args, **kwargs)


@contextlib.contextmanager
def checkpoints_have_averages() -> Iterator[None]:
    """Is a context manager: in its body, fairseq's function ``load_checkpoint_to_cpu`` returns averages of the weights.

    If a checkpoint has no averages, its weights stand in for them. To do so, the function is replaced in the body.
    """
    original_load = fairseq.checkpoint_utils.load_checkpoint_to_cpu
    key_of_averages = "ema"  # in the extra state of a checkpoint of fairseq

    def load_with_averages(*args: Any, **kwargs: Any) -> Any:
        checkpoint = original_load(*args, **kwargs)
        extra_state = checkpoint.get("extra_state")
        if extra_state is not None and key_of_averages not in extra_state:
            extra_state[key_of_averages] = dict(checkpoint["model"])  # a new dictionary with the same tensors
        return checkpoint

    fairseq.checkpoint_utils.load_checkpoint_to_cpu = load_with_averages
    try:
        yield
    finally:
        fairseq.checkpoint_utils.load_checkpoint_to_cpu = original_load
