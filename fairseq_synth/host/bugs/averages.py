"""Repairs of ``--store-ema``, the exponential moving average of the weights."""

from types import SimpleNamespace
from typing import Any

import fairseq.checkpoint_utils
from fairseq.models.ema.ema import EMA
from fairseq.trainer import Trainer

from ..repairs import repair


@repair("_step_internal", EMA)
def average_tied_weights_once(step: Any, self: EMA, new_model: Any, updates: Any = None) -> None:
    """``--store-ema`` averages tied weights too fast, as with ``--share-all-embeddings`` (all versions).

    A weight that the state dict lists under three names is averaged three times in each update.
    """
    averages = self.fp32_params if self.config.ema_fp32 else self.model.state_dict()
    first_names: dict[Any, str] = {}  # by the memory of an average: the first of its names
    for name, average in averages.items():
        first_names.setdefault((average.data_ptr(), average.shape), name)
    repeated_names = set(averages) - set(first_names.values())
    weights = {name: weight for name, weight in new_model.state_dict().items() if name not in repeated_names}
    step(self, SimpleNamespace(state_dict=lambda: weights), updates)


@repair("restore", EMA)
def keep_final_norm_under_ema(restore: Any, self: EMA, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    """``--store-ema`` loses the last layer norm with ``--encoder-`` or ``--decoder-normalize-before`` (all versions).

    The averages lack the version number that marks the format of the weights. fairseq takes weights without it for an
    old format, which had no such norm.
    """
    versions = {name: value for name, value in self.model.state_dict().items() if name.endswith(".version")}
    restore(self, {**versions, **state_dict}, *args, **kwargs)


@repair("load_checkpoint", Trainer)
def begin_averages_with_weights(load_checkpoint: Any, self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """``--store-ema`` ends in a KeyError with ``--finetune-from-model`` (all versions).

    The averages start from the weights of a checkpoint that has no averages, but fairseq has removed its weights from
    memory by then.
    """
    read = fairseq.checkpoint_utils.load_checkpoint_to_cpu

    def read_with_averages(*args: Any, **kwargs: Any) -> Any:
        state = read(*args, **kwargs)
        if self.cfg.ema.store_ema and state.get("extra_state") is not None:
            state["extra_state"].setdefault("ema", dict(state["model"]))
        return state

    fairseq.checkpoint_utils.load_checkpoint_to_cpu = read_with_averages
    try:
        return load_checkpoint(self, *args, **kwargs)
    finally:
        fairseq.checkpoint_utils.load_checkpoint_to_cpu = read
