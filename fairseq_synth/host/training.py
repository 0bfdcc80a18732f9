"""Repairs of fairseq's training: when it starts, when it ends, and what it averages."""

import inspect
import logging
import math
import os
import re
import signal
from types import SimpleNamespace
from typing import Any

import fairseq.checkpoint_utils
import fairseq.optim.lr_scheduler
import numpy as np
from fairseq.distributed import DistributedTimeoutWrapper
from fairseq.file_io import PathManager
from fairseq.logging import metrics
from fairseq.models.ema.ema import EMA
from fairseq.tasks import FairseqTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.trainer import Trainer
from fairseq.utils import resolve_max_positions

from ..errors import SynthesizerError, explain
from ..lengths import length_hint
from .repairs import repair

logger = logging.getLogger(__name__)


def signal_is_sigint() -> bool:
    """Whether a timeout of `DistributedTimeoutWrapper` sends SIGINT by default."""
    parameter = inspect.signature(DistributedTimeoutWrapper.__init__).parameters.get("signal")
    return parameter is not None and parameter.default is signal.SIGINT


@repair("__init__", DistributedTimeoutWrapper, where=signal_is_sigint)
def terminate_on_heartbeat_timeout(init: Any, *args: Any, **kwargs: Any) -> None:
    """``--heartbeat-timeout`` does not end a process that waits for a lost one (all versions).

    It sends SIGINT, which Python handles between its own instructions, and the wait is one call of gloo or NCCL.
    SIGTERM ends it.
    """
    call = inspect.signature(init).bind(*args, **kwargs)
    call.arguments.setdefault("signal", signal.SIGTERM)
    init(*call.args, **call.kwargs)


@repair("load_checkpoint", fairseq.checkpoint_utils)
def skip_finished_training(load_checkpoint: Any, cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """A run that has reached ``--max-update`` trains one update more each time it is called again (all versions).

    fairseq looks at the number of updates only after a step, and overwrites checkpoint_last.pt then.
    """
    extra_state, batches = load_checkpoint(cfg, trainer, **kwargs)
    updates, most = trainer.get_num_updates(), trainer.cfg.optimization.max_update
    if most and updates >= most:
        logger.info(f"nothing to do: {updates} updates are trained, --max-update is {most}")
        batches = NoEpochLeft(batches)
    return extra_state, batches


class NoEpochLeft:
    """A batch iterator without a next epoch: fairseq trains while ``next_epoch_idx <= max_epoch``."""

    next_epoch_idx = math.nan  # above any --max-epoch, infinity included

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


@repair("load_checkpoint", fairseq.checkpoint_utils)
def check_validation_lengths(load_checkpoint: Any, cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """A validation sentence that the model cannot take ends a run after its first epoch (0.12.2).

    Later versions say so before the first batch, but neither where nor how many. Here the line names the data set.
    """
    if validates(trainer.cfg) and not trainer.cfg.dataset.skip_invalid_size_inputs_valid_test:
        check_lengths(trainer)
    return load_checkpoint(cfg, trainer, **kwargs)


@repair("load_checkpoint", fairseq.checkpoint_utils)
def check_best_metric(load_checkpoint: Any, cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """A ``--best-checkpoint-metric`` that validation does not measure loses the first epoch (all versions).

    A KeyError ends it before its checkpoint is saved. Here a first batch is validated before the training, unless the
    metric is one that is always there.
    """
    loaded = load_checkpoint(cfg, trainer, **kwargs)
    metric, task = cfg.best_checkpoint_metric, getattr(trainer.task, "cfg", None)
    is_known = metric == "loss" or (metric == "bleu" and getattr(task, "eval_bleu", False))
    if not is_known and validates(trainer.cfg):
        names = measured(trainer)
        if metric not in names:
            bleu = ", and bleu with --eval-bleu" if hasattr(task, "eval_bleu") else ""
            raise SynthesizerError(
                f"--best-checkpoint-metric {metric}: validation does not measure it, but {', '.join(names)}{bleu}"
            )
    return loaded


def validates(cfg: Any) -> bool:
    """Whether a run reaches a validation."""
    never = 0 < (cfg.optimization.max_update or 0) < cfg.dataset.validate_after_updates
    return not (cfg.dataset.disable_validation or never)


def measured(trainer: Any) -> list[str]:
    """What the validation of a batch measures."""
    batches = trainer.get_valid_iterator(trainer.cfg.dataset.valid_subset.split(",")[0])
    with metrics.aggregate(new_root=True) as found:
        # all batches are read, as a thread that loads ahead would be left behind
        for i, sample in enumerate(batches.next_epoch_itr(shuffle=False, set_dataset_epoch=False)):
            if i == 0:
                trainer.valid_step(sample)
    return [name for name in found.get_smoothed_values() if not name.startswith("_")]


def check_lengths(trainer: Any) -> None:
    """Raises SynthesizerError for a validation set with sentences over the model's limit, or ``--max-tokens``.

    A task with a filter or batches of its own is left alone.
    """
    task, kind = trainer.task, type(trainer.task)
    own = ("filter_indices_by_size", "get_batch_iterator")
    if any(getattr(kind, name) is not getattr(FairseqTask, name) for name in own):
        return
    most = trainer.cfg.dataset.max_tokens_valid
    limits = resolve_max_positions(task.max_positions(), trainer.get_model().max_positions(), most)
    for subset in trainer.cfg.dataset.valid_subset.split(","):
        if subset not in task.datasets or limits is None or isinstance(limits, dict):  # of several pairs of languages
            continue
        dataset = task.dataset(subset)
        _, ignored = dataset.filter_indices_by_size(np.arange(len(dataset)), limits)
        if len(ignored):
            sizes = dataset.size(ignored[0])
            size = ", ".join(str(int(size)) for size in (sizes if isinstance(sizes, tuple) else (sizes,)))
            limit = f"max_positions={limits}"
            hint, first = length_hint(limit), ""
            if most is not None and np.max(sizes) > most:
                first = f"--max-tokens {most}: raise it, or --max-tokens-valid; "
            elif hint:
                first = "--synth-max-length: train with a larger one; "
            # "skip this example with --skip-..." are fairseq's words, which scripts may look for
            raise SynthesizerError(
                f"{first}--valid-subset {subset}: {len(ignored)} sentences are too long, the first is number "
                f"{ignored[0] + 1} (its tokens: {size}; {limit}); shorten each, or skip this example with "
                "--skip-invalid-size-inputs-valid-test" + hint
            )


@repair("load_checkpoint", Trainer)
def check_restored_checkpoint(load_checkpoint: Any, self: Trainer, filename: str, *args: Any, **kwargs: Any) -> Any:
    """A ``--restore-file`` that is not there is no error: the run trains from nothing (all versions).

    And an error about a checkpoint that does not fit does not name it.
    """
    cfg = self.cfg.checkpoint
    own = os.path.join(cfg.save_dir, f"checkpoint_last{self.checkpoint_suffix}.pt")
    if filename != own and not PathManager.isfile(filename):
        flag = "--continue-once" if filename == getattr(cfg, "continue_once", None) else "--restore-file"
        beside = os.path.join(cfg.save_dir, filename)
        found = f"; there is {beside}" if PathManager.isfile(beside) else ""
        raise SynthesizerError(f"{flag} {filename}: no such file{found}; give one, or leave the flag out")
    try:
        return load_checkpoint(self, filename, *args, **kwargs)
    except Exception as error:
        line = explain(error)
        if line is None or filename in line:
            raise
        new = "; a new training needs a --save-dir of its own" if filename == own else ""
        raise SynthesizerError(f"{filename}: {line}{new}") from error


@repair("build_lr_scheduler", fairseq.optim.lr_scheduler)
def name_other_scheduler(build_lr_scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """A training resumed with another ``--lr-scheduler`` ends in a KeyError, or later in a TypeError (all versions)."""
    scheduler = build_lr_scheduler(*args, **kwargs)
    load_state_dict = scheduler.load_state_dict

    def load_own(state_dict: dict[str, Any]) -> None:
        if set(state_dict) != set(scheduler.state_dict()):
            raise SynthesizerError(
                "--lr-scheduler: the training of the checkpoint had another one; give that, or --reset-lr-scheduler"
            )
        load_state_dict(state_dict)

    scheduler.load_state_dict = load_own
    return scheduler


@repair("load_dataset", SentencePredictionTask)
def check_classes(load_dataset: Any, self: SentencePredictionTask, split: str, *args: Any, **kwargs: Any) -> Any:
    """Fewer ``--num-classes`` than labels end in an IndexError, on a GPU in an assertion of CUDA (all versions)."""
    dataset = load_dataset(self, split, *args, **kwargs)
    classes = self.cfg.num_classes
    words = [] if self.cfg.regression_target else self.label_dictionary.symbols[self.label_dictionary.nspecial :]
    labels = [word for word in words if not re.match("madeupword|<mask>", word)]  # without what fairseq adds
    if len(labels) > classes and any(int(dataset[i]["target"]) >= classes for i in range(len(dataset))):
        raise SynthesizerError(
            f"--num-classes {classes}: the data have {len(labels)} labels ({', '.join(labels)}); give "
            f"--num-classes {len(labels)}"
        )
    return dataset


@repair("_step_internal", EMA)
def average_tied_weights_once(step: Any, self: EMA, new_model: Any, updates: Any = None) -> None:
    """``--store-ema`` averages tied weights too fast, as with ``--share-all-embeddings`` (all versions).

    A weight that the state dict names three times is averaged three times in each update.
    """
    averages = self.fp32_params if self.config.ema_fp32 else self.model.state_dict()
    first: dict[Any, str] = {}  # where an average is stored -> its first name
    for name, average in averages.items():
        first.setdefault((average.data_ptr(), average.shape), name)
    tied = set(averages) - set(first.values())
    weights = {name: weight for name, weight in new_model.state_dict().items() if name not in tied}
    step(self, SimpleNamespace(state_dict=lambda: weights), updates)


@repair("restore", EMA)
def keep_final_norm_under_ema(restore: Any, self: EMA, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    """``--store-ema`` loses the last layer norm with ``--encoder-`` or ``--decoder-normalize-before`` (all versions).

    EMA's averages lack the version number of the format. fairseq takes weights without it for an old model's, which
    had no such norm.
    """
    versions = {name: value for name, value in self.model.state_dict().items() if name.endswith(".version")}
    restore(self, {**versions, **state_dict}, *args, **kwargs)


@repair("load_checkpoint", Trainer)
def begin_averages_with_weights(load_checkpoint: Any, self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """``--store-ema`` ends in a KeyError with ``--finetune-from-model`` (all versions).

    The averages begin with the weights of a checkpoint that has none of its own, and fairseq has removed those by then.
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
