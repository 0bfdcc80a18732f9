"""Repairs of how a training ends, and of what a training that is started again knows about that."""

import logging
import math
import os
import sys
from types import ModuleType
from typing import Any

import fairseq.checkpoint_utils
from fairseq.data.iterators import GroupedIterator
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from ...errors import SynthesizerError
from ..repairs import repair

logger = logging.getLogger(__name__)

STATE = "early_stopping"  # the key of a checkpoint's extra state under which the count of --patience is kept


class NoEpochLeft:
    """A batch iterator without a next epoch: fairseq trains while ``next_epoch_idx <= max_epoch``."""

    next_epoch_idx = math.nan  # no comparison with a number is true, not even with an infinite --max-epoch

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


@repair(
    "load_checkpoint",
    fairseq.checkpoint_utils,
    symptom="A run that has reached `--max-update` trains one update more each time it is called again",
    versions="all versions",
)
def skip_finished_training(original_load_checkpoint: Any, cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``load_checkpoint`` with one that leaves no epoch to train if ``--max-update`` is reached already.

    fairseq compares the number of updates only after a step, and then overwrites checkpoint_last.pt. The same holds for
    ``--stop-time-hours``.
    """
    extra_state, batches = original_load_checkpoint(cfg, trainer, **kwargs)
    limits = trainer.cfg.optimization
    updates = trainer.get_num_updates()
    hours = trainer.cumulative_training_time() / 3600
    reason = ""
    if limits.max_update and updates >= limits.max_update:
        reason = f"{updates} updates are trained, --max-update is {limits.max_update}"
    elif updates and 0 < limits.stop_time_hours < hours:
        reason = f"the training has taken {hours:.1f} hours, --stop-time-hours is {limits.stop_time_hours}"
    if reason:
        logger.info(f"nothing to do: {reason}")
        batches = NoEpochLeft(batches)
    return extra_state, batches


@repair(
    "save_checkpoint",
    Trainer,
    symptom="`--patience` counts anew when a training is started again, even if it had ended the training",
    versions="all versions",
)
def save_patience(original_save_checkpoint: Any, self: Trainer, filename: str, extra_state: dict[str, Any]) -> Any:
    """Replaces the trainer's ``save_checkpoint`` with one that also saves how far ``--patience`` has counted.

    fairseq keeps the best score and the number of validations since then only in memory. `resume_patience` reads them
    from the checkpoint.
    """
    for module in training_modules():
        best = getattr(module.should_stop_early, "best", None)
        if best is not None:
            extra_state[STATE] = {
                "best": float(best),
                "num_runs": module.should_stop_early.num_runs,
                "metric": self.cfg.checkpoint.best_checkpoint_metric,
            }
    return original_save_checkpoint(self, filename, extra_state)


@repair(
    "load_checkpoint",
    fairseq.checkpoint_utils,
    symptom="A training that `--patience` has ended goes on when it is started again",
    versions="all versions",
)
def resume_patience(original_load_checkpoint: Any, cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``load_checkpoint`` with one that goes on counting for ``--patience`` where `save_patience` has stopped.

    If the patience is used up, no epoch is left to train. With ``--reset-optimizer`` or ``--reset-meters``, as with
    ``--finetune-from-model``, it is a new training, whose validations count from 0.
    """
    is_new = cfg.reset_optimizer or cfg.reset_meters or starts_from_other_model(cfg, trainer)
    extra_state, batches = original_load_checkpoint(cfg, trainer, **kwargs)
    saved = None if is_new or extra_state is None else extra_state.get(STATE)
    if saved is not None and saved["metric"] != cfg.best_checkpoint_metric:
        saved = None  # scores of another metric cannot be compared
    for module in training_modules():
        restore_patience(module.should_stop_early, saved)
    if saved is not None and 0 < cfg.patience <= saved["num_runs"]:
        validations = saved["num_runs"]
        logger.info(f"nothing to do: the last {validations} validations were no better, --patience is {cfg.patience}")
        batches = NoEpochLeft(batches)
    return extra_state, batches


def restore_patience(should_stop_early: Any, saved: dict[str, Any] | None) -> None:
    """Sets the attributes in which fairseq's function counts validations, or removes them if nothing was saved."""
    if saved is not None:
        should_stop_early.best = saved["best"]
        should_stop_early.num_runs = saved["num_runs"]
    elif hasattr(should_stop_early, "best"):
        del should_stop_early.best


def starts_from_other_model(cfg: Any, trainer: Any) -> bool:
    """Returns whether ``--finetune-from-model`` is what this training starts from."""
    last = os.path.join(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
    return cfg.finetune_from_model is not None and not PathManager.exists(last)


def training_modules() -> list[ModuleType]:
    """Returns the loaded copies of ``fairseq_cli.train``; ``python -m fairseq_cli.train`` calls its copy __main__."""
    modules = [sys.modules.get(name) for name in ("fairseq_cli.train", "__main__")]
    return [module for module in modules if module is not None and hasattr(module, "should_stop_early")]


@repair(
    "__init__",
    GroupedIterator,
    symptom="`--skip-remainder-batch` with a small corpus ends in an UnboundLocalError of `valid_losses`",
    versions="all versions",
)
def refuse_epoch_without_update(
    original_init: Any, self: GroupedIterator, iterable: Any, chunk_size: int, skip_remainder_batch: bool = False
) -> None:
    """Replaces ``GroupedIterator.__init__`` with one that refuses ``--skip-remainder-batch`` if it leaves no update.

    The flag leaves out the batches that do not fill an update. An epoch may have no others, and then there is nothing
    to train.
    """
    number_of_batches = len(iterable)
    original_init(self, iterable, chunk_size, skip_remainder_batch=skip_remainder_batch)
    if skip_remainder_batch and not self.has_next():
        raise SynthesizerError(
            f"--skip-remainder-batch leaves no update in an epoch, which has {number_of_batches} batches without its "
            f"last one: --update-freq {chunk_size} asks for {chunk_size} in an update; leave the flag out, lower "
            "--update-freq, or make smaller batches"
        )
