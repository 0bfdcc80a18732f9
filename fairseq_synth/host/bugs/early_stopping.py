"""Repairs of how a training ends, and of what a training that is started again knows about that."""

import logging
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import fairseq.checkpoint_utils
from fairseq.data.iterators import GroupedIterator
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from ...errors import SynthesizerError
from ..repairs import repair

logger = logging.getLogger(__name__)

STATE = "early_stopping"  # a checkpoint has the count of --patience under this key of its extra state


class NoEpochLeft:
    """Stands for an iterator over batches, but tells fairseq that no epoch is left to train.

    fairseq trains while ``next_epoch_idx <= max_epoch``. All other attributes are those of the iterator.
    """

    next_epoch_idx = math.nan  # nan <= max_epoch is False, also for an infinite --max-epoch

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


@repair(
    "load_checkpoint",
    fairseq.checkpoint_utils,
    symptom="A finished run (`--max-update`) trains one more update each time the same command is called again",
    versions="all versions",
)
def skip_finished_training(original: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_checkpoint`` (``original``): a finished training stays finished.

    If the loaded checkpoint has reached ``--max-update`` or ``--stop-time-hours``, no epoch is left to train. fairseq
    checks these limits only after an update. It would train one update more, and overwrite checkpoint_last.pt.

    Returns:
        What the original returns: the extra state of the checkpoint, and the iterator over the batches of an epoch. If
        the training is finished, the iterator says that no epoch is left.
    """
    extra_state, batches = original(cfg, trainer, **kwargs)
    reason = why_training_is_finished(trainer)
    if reason is None:
        return extra_state, batches
    return extra_state, end_training(batches, reason)


def end_training(batches: Any, reason: str) -> NoEpochLeft:
    """Logs why a training is finished, and returns its batches in a form that lets fairseq end the training at once."""
    logger.info(f"nothing to do: {reason}")
    return NoEpochLeft(batches)


def why_training_is_finished(trainer: Any) -> str | None:
    """Returns which limit a training has reached, in words; None if it has reached neither.

    The limits are ``--max-update`` and ``--stop-time-hours``. The value 0 is no limit.

    Args:
        trainer: fairseq's trainer, after it has loaded the checkpoint from which the training goes on.
    """
    updates = trainer.get_num_updates()
    if updates == 0:
        return None  # A new training has reached no limit. fairseq also checks the limits only after an update.
    limits = trainer.cfg.optimization
    if limits.max_update and updates >= limits.max_update:
        return f"the model has {updates} updates, and --max-update is {limits.max_update}"
    hours = trainer.cumulative_training_time() / 3600  # fairseq counts seconds
    if limits.stop_time_hours > 0 and hours > limits.stop_time_hours:
        return f"the training took {hours:.1f} hours, and --stop-time-hours is {limits.stop_time_hours}"
    return None


@repair(
    "save_checkpoint",
    Trainer,
    symptom="`--patience` forgets its count when a training is resumed",
    versions="all versions",
)
def save_patience(original: Callable[..., Any], self: Trainer, filename: str, extra_state: dict[str, Any]) -> Any:
    """Replaces ``Trainer.save_checkpoint`` (``original``): also saves the count of ``--patience`` in the checkpoint.

    ``--patience N`` ends a training after N validations without a better score. fairseq keeps the best score and the
    number of validations since then only in memory. The replacement adds them to `extra_state`, and `resume_patience`
    reads them again.
    """
    count = find_current_count()  # fairseq keeps it as attributes of a function
    if count.best_score is not None:
        extra_state[STATE] = {
            "best": float(count.best_score),
            "num_runs": count.validations_since_best,
            "metric": self.cfg.checkpoint.best_checkpoint_metric,
        }
    return original(self, filename, extra_state)


class PatienceCount(NamedTuple):
    """How far ``--patience`` has counted: the best score, and the number of validations since then.

    The best score is None before the first validation.
    """

    best_score: float | None
    validations_since_best: int


NEW_COUNT = PatienceCount(best_score=None, validations_since_best=0)


@repair(
    "load_checkpoint",
    fairseq.checkpoint_utils,
    symptom="A training that `--patience` has stopped continues when the same command is called again",
    versions="all versions",
)
def resume_patience(original: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_checkpoint`` (``original``): continues the count of ``--patience``.

    fairseq calls this function once, before the first update. ``--patience N`` ends a training after N validations
    without a better score. The replacement restores the best score and the number of validations since then from the
    checkpoint, where `save_patience` has saved them. If this number has reached N, the training ends at once.

    Returns:
        What the original returns: the extra state of the checkpoint, and the iterator over the batches of an epoch. If
        the training ends at once, the iterator says that no epoch is left.
    """
    is_new_training = begins_new_training(cfg, trainer)  # This has to be found out before the checkpoint is loaded.
    extra_state, batches = original(cfg, trainer, **kwargs)
    if is_new_training:
        count = NEW_COUNT
    else:
        count = find_saved_count(extra_state, metric=cfg.best_checkpoint_metric)
    set_current_count(count)
    has_limit = cfg.patience > 0
    if has_limit and count.validations_since_best >= cfg.patience:
        reason = f"the last {count.validations_since_best} validations were no better, --patience is {cfg.patience}"
        return extra_state, end_training(batches, reason)
    return extra_state, batches


def find_saved_count(extra_state: dict[str, Any] | None, metric: str) -> PatienceCount:
    """Returns the count of ``--patience`` that `save_patience` has saved in a checkpoint; a new count if there is none.

    A count that was saved for another metric is not returned, because the scores cannot be compared.

    Args:
        extra_state: the extra state of the checkpoint, or None if there is no checkpoint.
        metric: the metric of this training, ``--best-checkpoint-metric``.
    """
    if extra_state is None or STATE not in extra_state:
        return NEW_COUNT
    saved = extra_state[STATE]
    if saved["metric"] != metric:
        return NEW_COUNT
    return PatienceCount(best_score=saved["best"], validations_since_best=saved["num_runs"])


def set_current_count(count: PatienceCount) -> None:
    """Sets fairseq's count of ``--patience``, which fairseq keeps in two attributes of `should_stop_early`."""
    for should_stop_early in find_stop_functions():
        should_stop_early.best = count.best_score
        should_stop_early.num_runs = count.validations_since_best


def find_current_count() -> PatienceCount:
    """Returns fairseq's count of ``--patience``; it is a new count before the first validation."""
    current_count = NEW_COUNT
    # If both copies of the function have counted, the last one is that of `__main__`, which runs this training.
    for should_stop_early in find_stop_functions():
        best_score = getattr(should_stop_early, "best", None)
        if best_score is not None:
            current_count = PatienceCount(best_score, validations_since_best=should_stop_early.num_runs)
    return current_count


def begins_new_training(cfg: Any, trainer: Any) -> bool:
    """Returns whether a training starts anew instead of continuing the training in its checkpoint.

    It starts anew with ``--reset-optimizer`` or ``--reset-meters``, and also with ``--finetune-from-model`` if there is
    no checkpoint_last.pt yet. Call this before the checkpoint is loaded.

    Args:
        cfg: the flags for checkpoints.
        trainer: fairseq's trainer.
    """
    if cfg.reset_optimizer or cfg.reset_meters:
        return True
    if cfg.finetune_from_model is None:
        return False
    last_checkpoint = os.path.join(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
    return not PathManager.exists(last_checkpoint)


def find_stop_functions() -> list[Any]:
    """Returns all copies of fairseq's function ``should_stop_early``, which counts for ``--patience``.

    A copy is in the module ``fairseq_cli.train``, if a program has imported it. ``python -m fairseq_cli.train`` runs
    the same file under the name ``__main__``, which then has a copy of its own.
    """
    stop_functions = []
    for module_name in ("fairseq_cli.train", "__main__"):
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, "should_stop_early"):
            stop_functions.append(module.should_stop_early)
    return stop_functions


@repair(
    "__init__",
    GroupedIterator,
    symptom="`--skip-remainder-batch` with a small corpus fails with an UnboundLocalError of `valid_losses`",
    versions="all versions",
)
def refuse_epoch_without_update(
    original: Callable[..., Any],
    self: GroupedIterator,
    iterable: Any,
    chunk_size: int,
    skip_remainder_batch: bool = False,
) -> None:
    """Replaces ``GroupedIterator.__init__`` (``original``): raises SynthesizerError if an epoch has no update.

    The iterator groups the batches of an epoch into updates. ``--skip-remainder-batch`` leaves out the batches at the
    end that do not fill an update. With a small corpus, no update is left, and fairseq ends in an UnboundLocalError.

    Args:
        original: fairseq's constructor.
        self: the new iterator.
        iterable: the batches of an epoch. fairseq has already left out the last one, which may be smaller than the
            others, if ``--skip-remainder-batch`` is given.
        chunk_size: the number of batches in an update, ``--update-freq``.
        skip_remainder_batch: the flag of this name.
    """
    num_batches = len(iterable)  # They are counted now, because the original removes batches from `iterable`.
    original(self, iterable, chunk_size, skip_remainder_batch=skip_remainder_batch)
    has_update = self.has_next()
    if skip_remainder_batch and not has_update:
        raise SynthesizerError(
            f"--skip-remainder-batch: an epoch has {num_batches} batches without its last one, but an update "
            f"needs {chunk_size} (--update-freq {chunk_size}); remove the flag, lower --update-freq, or use smaller "
            "batches"
        )
