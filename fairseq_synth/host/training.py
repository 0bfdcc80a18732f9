"""Repairs of fairseq's training: when it starts, when it ends, and what it averages."""

import importlib.util
import inspect
import logging
import math
import signal
from types import SimpleNamespace
from typing import Any, Dict

import fairseq.checkpoint_utils
import fairseq.options
import numpy as np
from fairseq.distributed import DistributedTimeoutWrapper
from fairseq.models.ema.ema import EMA
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from fairseq.utils import resolve_max_positions

from ..errors import SynthesizerError, length_hint
from .repairs import repair, replace

logger = logging.getLogger(__name__)


@repair
def allow_bf16_without_tpu() -> bool:
    """``--bf16`` makes the command line ask for a TPU (0.12.2 and later).

    The error is "'NoneType' object has no attribute 'xla_device'". Hydra's ``common.bf16=true`` works. Without
    torch_xla there can be no TPU.
    """
    if importlib.util.find_spec("torch_xla") is not None:
        return False

    def without_tpu(parse_args_and_arch: Any) -> Any:
        def parse(*args: Any, **kwargs: Any) -> Any:
            parsed = parse_args_and_arch(*args, **kwargs)
            namespace = parsed[0] if isinstance(parsed, tuple) else parsed
            if getattr(namespace, "bf16", False):
                namespace.tpu = False
            return parsed

        return parse

    return replace(fairseq.options, "parse_args_and_arch", without_tpu)


@repair
def terminate_on_heartbeat_timeout() -> bool:
    """``--heartbeat-timeout`` does not end a process that waits for a lost one (all versions).

    It sends SIGINT, which Python handles between its own instructions, and the wait is one call of gloo or NCCL.
    SIGTERM ends it.
    """
    parameter = inspect.signature(DistributedTimeoutWrapper.__init__).parameters.get("signal")
    if parameter is None or parameter.default is not signal.SIGINT:
        return False

    def with_sigterm(init: Any) -> Any:
        def init_with_sigterm(*args: Any, **kwargs: Any) -> None:
            call = inspect.signature(init).bind(*args, **kwargs)
            call.arguments.setdefault("signal", signal.SIGTERM)
            init(*call.args, **call.kwargs)

        return init_with_sigterm

    return replace(DistributedTimeoutWrapper, "__init__", with_sigterm)


@repair
def skip_finished_training() -> bool:
    """A run that has reached ``--max-update`` trains one update more each time it is called again (all versions).

    fairseq looks at the number of updates only after a step, and overwrites checkpoint_last.pt then.
    """

    def unless_finished(load_checkpoint: Any) -> Any:
        def load(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
            extra_state, batches = load_checkpoint(cfg, trainer, **kwargs)
            updates, most = trainer.get_num_updates(), trainer.cfg.optimization.max_update
            if most and updates >= most:
                logger.info(f"nothing to do: {updates} updates are trained, --max-update is {most}")
                batches = NoEpochLeft(batches)
            return extra_state, batches

        return load

    return replace(fairseq.checkpoint_utils, "load_checkpoint", unless_finished)


class NoEpochLeft:
    """A batch iterator without a next epoch: fairseq trains while ``next_epoch_idx <= max_epoch``."""

    next_epoch_idx = math.nan  # above any --max-epoch, infinity included

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


@repair
def check_validation_lengths() -> bool:
    """A validation sentence that the model cannot take ends a run after its first epoch (0.12.2).

    Later versions say so before the first batch, but neither where nor how many. Here the line names the data set.
    """

    def after_check(load_checkpoint: Any) -> Any:
        def load(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
            if will_validate(trainer.cfg):
                check_lengths(trainer)
            return load_checkpoint(cfg, trainer, **kwargs)

        return load

    return replace(fairseq.checkpoint_utils, "load_checkpoint", after_check)


def will_validate(cfg: Any) -> bool:
    """Whether a run reaches a validation that stops at a sentence which is too long."""
    never = 0 < (cfg.optimization.max_update or 0) < cfg.dataset.validate_after_updates
    return not (cfg.dataset.disable_validation or cfg.dataset.skip_invalid_size_inputs_valid_test or never)


def check_lengths(trainer: Any) -> None:
    """Raises SynthesizerError for a validation set with sentences over the model's limit.

    A task with a filter or batches of its own is left alone.
    """
    task, kind = trainer.task, type(trainer.task)
    own = ("filter_indices_by_size", "get_batch_iterator")
    if any(getattr(kind, name) is not getattr(FairseqTask, name) for name in own):
        return
    limits = resolve_max_positions(task.max_positions(), trainer.get_model().max_positions())
    for subset in trainer.cfg.dataset.valid_subset.split(","):
        if subset not in task.datasets or limits is None or isinstance(limits, dict):  # of several pairs of languages
            continue
        dataset = task.dataset(subset)
        _, ignored = dataset.filter_indices_by_size(np.arange(len(dataset)), limits)
        if len(ignored):
            sizes = dataset.size(ignored[0])
            size = ", ".join(str(int(size)) for size in (sizes if isinstance(sizes, tuple) else (sizes,)))
            limit = f"max_positions={limits}"
            hint = length_hint(limit)
            first = "--synth-max-length: train with a larger one; " if hint else ""
            # "skip this example with --skip-..." are fairseq's words, which scripts may look for
            raise SynthesizerError(
                f"{first}--valid-subset {subset}: {len(ignored)} sentences are too long, the first is number "
                f"{ignored[0] + 1} (its tokens: {size}; {limit}); shorten each, or skip this example with "
                "--skip-invalid-size-inputs-valid-test" + hint
            )


@repair
def average_tied_weights_once() -> bool:
    """``--store-ema`` averages tied weights too fast, as with ``--share-all-embeddings`` (all versions).

    A weight that the state dict names three times is averaged three times in each update.
    """

    def once(step: Any) -> Any:
        def step_once(self: EMA, new_model: Any, updates: Any = None) -> None:
            averages = self.fp32_params if self.config.ema_fp32 else self.model.state_dict()
            first: Dict[Any, str] = {}  # where an average is stored -> its first name
            for name, average in averages.items():
                first.setdefault((average.data_ptr(), average.shape), name)
            tied = set(averages) - set(first.values())
            weights = {name: weight for name, weight in new_model.state_dict().items() if name not in tied}
            step(self, SimpleNamespace(state_dict=lambda: weights), updates)

        return step_once

    return replace(EMA, "_step_internal", once)


@repair
def keep_final_norm_under_ema() -> bool:
    """``--store-ema`` loses the last layer norm with ``--encoder-`` or ``--decoder-normalize-before`` (all versions).

    EMA's averages lack the version number of the format. fairseq takes weights without it for an old model's, which
    had no such norm.
    """

    def with_version(restore: Any) -> Any:
        def restore_with_version(self: EMA, state_dict: Any, *args: Any, **kwargs: Any) -> None:
            versions = {name: value for name, value in self.model.state_dict().items() if name.endswith(".version")}
            restore(self, {**versions, **state_dict}, *args, **kwargs)

        return restore_with_version

    return replace(EMA, "restore", with_version)


@repair
def begin_averages_with_weights() -> bool:
    """``--store-ema`` ends in a KeyError with ``--finetune-from-model`` (all versions).

    The averages begin with the weights of a checkpoint that has none of its own, and fairseq has removed those by then.
    """

    def with_averages(load_checkpoint: Any) -> Any:
        def load(self: Trainer, *args: Any, **kwargs: Any) -> Any:
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

        return load

    return replace(Trainer, "load_checkpoint", with_averages)
