"""Repairs of how a training ends, and of what a training that is started again knows about that."""

import logging
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import fairseq.checkpoint_utils
from fairseq.data.iterators import GroupedIterator
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from ...errors import SynthesizerError
from ..repairs import repair

logger = logging.getLogger(__name__)

STATE = "early_stopping"  # a checkpoint has the count of --patience under this key of its extra state


class NoEpochLeft:
    """An iterator over batches that tells fairseq that no epoch is left, so that it ends the training at once.

    fairseq trains while ``next_epoch_idx <= max_epoch``. Everything else is looked up in the iterator that it wraps.
    """

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
    symptom="A finished run (`--max-update`) trains one more update each time the same command is called again",
    versions="all versions",
)
def skip_finished_training(original: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_checkpoint`` (``original``): a finished training stays finished.

    If the loaded checkpoint has reached ``--max-update`` or ``--stop-time-hours``, no epoch is left to train. fairseq
    checks these limits only after an update. It would train one update more, and overwrite checkpoint_last.pt.

    Returns:
        What the original returns: the extra state of the checkpoint, and the iterator over the batches of an epoch.
    """
    extra_state, batches = original(cfg, trainer, **kwargs)
    reason = why_training_is_finished(trainer)
    if reason is None:
        return extra_state, batches
    logger.info(f"nothing to do: {reason}")
    return extra_state, NoEpochLeft(batches)


def why_training_is_finished(trainer: Any) -> str | None:
    """Returns which limit a training has reached, in words; None if it has reached neither.

    Args:
        trainer: fairseq's trainer, after it has loaded the checkpoint from which the training goes on.
    """
    limits = trainer.cfg.optimization  # a limit of 0 updates or hours is no limit
    updates = trainer.get_num_updates()
    if limits.max_update and updates >= limits.max_update:
        return f"the model has {updates} updates, and --max-update is {limits.max_update}"
    hours = trainer.cumulative_training_time() / 3600  # fairseq counts seconds
    is_new_training = updates == 0
    if not is_new_training and 0 < limits.stop_time_hours < hours:
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
    used_counters = [counter for counter in find_patience_counters() if getattr(counter, "best", None) is not None]
    if used_counters:
        counter = used_counters[-1]  # see `find_patience_counters`
        extra_state[STATE] = {
            "best": float(counter.best),
            "num_runs": counter.num_runs,
            "metric": self.cfg.checkpoint.best_checkpoint_metric,
        }
    return original(self, filename, extra_state)


@repair(
    "load_checkpoint",
    fairseq.checkpoint_utils,
    symptom="A training that `--patience` has stopped continues when the same command is called again",
    versions="all versions",
)
def resume_patience(original: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_checkpoint`` (``original``): continues the count of ``--patience``.

    ``--patience N`` ends a training after N validations without a better score. The replacement restores the best score
    and the number of validations since then, which `save_patience` has saved in the checkpoint. If this number has
    reached N, no epoch is left to train.

    Returns:
        What the original returns: the extra state of the checkpoint, and the iterator over the batches of an epoch.
    """
    # This must look at the files and flags as they are before the checkpoint is loaded.
    is_new_training = begins_new_training(cfg, trainer)
    extra_state, batches = original(cfg, trainer, **kwargs)
    if extra_state is None or is_new_training:  # None: there is no checkpoint
        saved_patience = None
    else:
        saved_patience = find_saved_patience(extra_state, metric=cfg.best_checkpoint_metric)
    for counter in find_patience_counters():
        restore_patience(counter, saved_patience)

    has_patience_limit = cfg.patience > 0
    if saved_patience is None or not has_patience_limit:
        return extra_state, batches
    validations = saved_patience["num_runs"]
    if validations < cfg.patience:
        return extra_state, batches
    logger.info(f"nothing to do: the last {validations} validations were no better, --patience is {cfg.patience}")
    return extra_state, NoEpochLeft(batches)


def find_saved_patience(extra_state: dict[str, Any], metric: str) -> dict[str, Any] | None:
    """Returns the count of ``--patience`` that `save_patience` has saved in the extra state of a checkpoint.

    It is a dict with the best score ("best"), the number of validations since then ("num_runs"), and the metric of the
    score ("metric"). Returns None if there is none, or if it is of another metric, whose scores cannot be compared.
    """
    saved_patience = extra_state.get(STATE)
    if saved_patience is None or saved_patience["metric"] != metric:
        return None
    return saved_patience


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
    last_checkpoint = os.path.join(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
    return cfg.finetune_from_model is not None and not PathManager.exists(last_checkpoint)


def restore_patience(counter: Any, saved_patience: dict[str, Any] | None) -> None:
    """Sets the count of ``--patience`` to what a checkpoint has saved.

    Args:
        counter: fairseq's function ``should_stop_early``, in whose attributes fairseq keeps the count. They are
            changed.
        saved_patience: the best score ("best") and the number of validations since then ("num_runs"); None to start
            anew.
    """
    if saved_patience is not None:
        counter.best = saved_patience["best"]
        counter.num_runs = saved_patience["num_runs"]
    elif hasattr(counter, "best"):
        del counter.best  # Without it, fairseq sets both attributes anew after the next validation.


def find_patience_counters() -> list[Any]:
    """Returns fairseq's function ``should_stop_early``, in whose attributes fairseq keeps the count of ``--patience``.

    There can be two copies of this function. ``python -m fairseq_cli.train`` runs the module ``fairseq_cli.train`` by
    the name ``__main__``, and another program may import the same module by its own name. Only the copy that runs the
    training counts. If both have counted, the copy in ``__main__``, which is the last one of the list, is right.
    """
    counters = []
    for module_name in ("fairseq_cli.train", "__main__"):
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, "should_stop_early"):
            counters.append(module.should_stop_early)
    return counters


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
        iterable: the batches of an epoch. With ``--skip-remainder-batch``, the last batch of the epoch is not among
            them, because fairseq has left it out already.
        chunk_size: the number of batches in an update, ``--update-freq``.
        skip_remainder_batch: the flag of this name.
    """
    # They are counted now, because the original removes batches from `iterable`.
    number_of_batches = len(iterable)
    original(self, iterable, chunk_size, skip_remainder_batch=skip_remainder_batch)
    if skip_remainder_batch and not self.has_next():
        raise SynthesizerError(
            f"--skip-remainder-batch: an epoch has no update: it has {number_of_batches} batches without its last "
            f"one, and an update needs {chunk_size} (--update-freq {chunk_size}); remove the flag, lower "
            "--update-freq, or use smaller batches"
        )
