"""Repairs of ``--store-ema``, the exponential moving average of the weights."""

from types import SimpleNamespace
from typing import Any

import fairseq.checkpoint_utils
from fairseq.models.ema.ema import EMA
from fairseq.trainer import Trainer

from ..repairs import repair


@repair(
    "_step_internal",
    EMA,
    symptom="`--store-ema` averages tied weights too fast, as with `--share-all-embeddings`",
    versions="all versions",
)
def average_tied_weights_once(original_step: Any, self: EMA, new_model: Any, updates: Any = None) -> None:
    """Replaces the update of fairseq's ``EMA`` with one that averages each tied weight only once.

    The state dict lists a tied weight under several names, and the original averages it once for each of them, so three
    times in an update with ``--share-all-embeddings``.
    """
    averages = self.fp32_params if self.config.ema_fp32 else self.model.state_dict()
    first_names: dict[Any, str] = {}  # by the memory of an average: the first of its names
    for name, average in averages.items():
        first_names.setdefault((average.data_ptr(), average.shape), name)
    repeated_names = set(averages) - set(first_names.values())
    weights = {name: weight for name, weight in new_model.state_dict().items() if name not in repeated_names}
    original_step(self, SimpleNamespace(state_dict=lambda: weights), updates)


@repair(
    "restore",
    EMA,
    symptom="`--store-ema` loses the last layer norm with `--encoder-` or `--decoder-normalize-before`",
    versions="all versions",
)
def keep_final_norm_under_ema(original_restore: Any, self: EMA, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the ``restore`` of fairseq's ``EMA`` with one that adds the model's version numbers to the averages.

    The version number marks the format of the weights. fairseq takes weights without it for an old format, which had no
    last layer norm, and then removes that norm.
    """
    versions = {name: value for name, value in self.model.state_dict().items() if name.endswith(".version")}
    original_restore(self, {**versions, **state_dict}, *args, **kwargs)


@repair(
    "load_checkpoint",
    Trainer,
    symptom="`--store-ema` ends in a KeyError with `--finetune-from-model`",
    versions="all versions",
)
def begin_averages_with_weights(original_load_checkpoint: Any, self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Replaces the trainer's ``load_checkpoint``: averages that a checkpoint lacks begin with its weights.

    fairseq means to do the same, but has removed the checkpoint's weights from memory by then.
    """
    read = fairseq.checkpoint_utils.load_checkpoint_to_cpu

    def read_with_averages(*args: Any, **kwargs: Any) -> Any:
        state = read(*args, **kwargs)
        if self.cfg.ema.store_ema and state.get("extra_state") is not None:
            state["extra_state"].setdefault("ema", dict(state["model"]))
        return state

    fairseq.checkpoint_utils.load_checkpoint_to_cpu = read_with_averages
    try:
        return original_load_checkpoint(self, *args, **kwargs)
    finally:
        fairseq.checkpoint_utils.load_checkpoint_to_cpu = read
