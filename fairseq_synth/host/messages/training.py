"""Checks before the first update what would otherwise end a training after its first epoch."""

import re
from typing import Any

import fairseq.checkpoint_utils
import numpy as np
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.utils import resolve_max_positions

from ...errors import SynthesizerError
from ...lengths import length_hint
from ..repairs import repair


@repair(
    "load_checkpoint",
    fairseq.checkpoint_utils,
    symptom="A validation sentence that the model cannot take ends a run after its first epoch",
    versions="0.12.2",
)
def check_validation_lengths(original_load_checkpoint: Any, cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``load_checkpoint`` with one that checks the lengths of the validation sentences before the training.

    Later versions than 0.12.2 end before the first batch too, but say neither in which data set the sentences are nor
    how many there are.
    """
    if has_validation(trainer.cfg) and not trainer.cfg.dataset.skip_invalid_size_inputs_valid_test:
        check_lengths(trainer)
    return original_load_checkpoint(cfg, trainer, **kwargs)


def has_validation(cfg: Any) -> bool:
    """Returns whether a training reaches a validation."""
    max_update = cfg.optimization.max_update or 0
    ends_before = 0 < max_update < cfg.dataset.validate_after_updates
    return not cfg.dataset.disable_validation and not ends_before


def check_lengths(trainer: Any) -> None:
    """Checks that no sentence of a validation set is longer than the model's limit, or than ``--max-tokens``.

    A task with a filter or batches of its own is left alone. Raises SynthesizerError for the first set with such
    sentences.
    """
    task = trainer.task
    for method in ("filter_indices_by_size", "get_batch_iterator"):
        if getattr(type(task), method) is not getattr(FairseqTask, method):
            return
    max_tokens = trainer.cfg.dataset.max_tokens_valid
    limits = resolve_max_positions(task.max_positions(), trainer.get_model().max_positions(), max_tokens)
    if limits is None or isinstance(limits, dict):  # a dict is of several pairs of languages, which filter themselves
        return
    for subset in trainer.cfg.dataset.valid_subset.split(","):
        if subset in task.datasets:
            check_subset_lengths(task.dataset(subset), subset, limits, max_tokens)


def check_subset_lengths(dataset: Any, subset: str, limits: Any, max_tokens: int | None) -> None:
    """Checks the lengths of one validation set; raises SynthesizerError if a sentence is too long.

    Args:
        dataset: the validation set.
        subset: its name.
        limits: the largest number of tokens, or that of a source and that of a target.
        max_tokens: ``--max-tokens-valid``.
    """
    _, too_long = dataset.filter_indices_by_size(np.arange(len(dataset)), limits)
    if len(too_long) == 0:
        return
    first = too_long[0]
    size = dataset.size(first)
    sizes = size if isinstance(size, tuple) else (size,)
    tokens = ", ".join(str(int(number)) for number in sizes)
    limit = f"max_positions={limits}"
    hint = length_hint(limit)
    advice = ""
    if max_tokens is not None and max(sizes) > max_tokens:
        advice = f"--max-tokens {max_tokens}: raise it, or --max-tokens-valid; "
    elif hint:
        advice = "--synth-max-length: train with a larger one; "
    # "skip this example with --skip-..." are fairseq's own words, which scripts may look for
    raise SynthesizerError(
        f"{advice}--valid-subset {subset}: {len(too_long)} sentences are too long, the first is number {first + 1} "
        f"(its tokens: {tokens}; {limit}); shorten each, or skip this example with "
        f"--skip-invalid-size-inputs-valid-test{hint}"
    )


@repair(
    "load_checkpoint",
    fairseq.checkpoint_utils,
    symptom="A `--best-checkpoint-metric` that validation does not measure loses the first epoch",
    versions="all versions",
)
def check_best_metric(original_load_checkpoint: Any, cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``load_checkpoint`` with one that checks before the training that ``--best-checkpoint-metric`` exists.

    Otherwise a KeyError ends the first epoch before its checkpoint is saved. To find the metrics, a first batch is
    validated, unless the metric is one that is always there.
    """
    loaded = original_load_checkpoint(cfg, trainer, **kwargs)
    metric = cfg.best_checkpoint_metric
    task_flags = getattr(trainer.task, "cfg", None)
    is_known = metric == "loss" or (metric == "bleu" and getattr(task_flags, "eval_bleu", False))
    if is_known or not has_validation(trainer.cfg):
        return loaded
    names = find_metrics(trainer)
    if metric not in names:
        bleu = ", and bleu with --eval-bleu" if hasattr(task_flags, "eval_bleu") else ""
        raise SynthesizerError(
            f"--best-checkpoint-metric {metric}: validation does not measure it, but {', '.join(names)}{bleu}"
        )
    return loaded


def find_metrics(trainer: Any) -> list[str]:
    """Returns the names of what a validation measures, found by validating one batch."""
    batches = trainer.get_valid_iterator(trainer.cfg.dataset.valid_subset.split(",")[0])
    with metrics.aggregate(new_root=True) as aggregator:
        # All batches are read: a thread that loads ahead would be left behind otherwise.
        for i, sample in enumerate(batches.next_epoch_itr(shuffle=False, set_dataset_epoch=False)):
            if i == 0:
                trainer.valid_step(sample)
    return [name for name in aggregator.get_smoothed_values() if not name.startswith("_")]


@repair(
    "load_dataset",
    SentencePredictionTask,
    symptom="Fewer `--num-classes` than labels end in an IndexError, on a GPU in an assertion of CUDA",
    versions="all versions",
)
def check_classes(
    original_load_dataset: Any, self: SentencePredictionTask, split: str, *args: Any, **kwargs: Any
) -> Any:
    """Replaces the task's ``load_dataset`` with one that checks that ``--num-classes`` suffices for the labels."""
    dataset = original_load_dataset(self, split, *args, **kwargs)
    if self.cfg.regression_target:
        return dataset
    num_classes = self.cfg.num_classes
    words = self.label_dictionary.symbols[self.label_dictionary.nspecial :]
    labels = [word for word in words if not re.match("madeupword|<mask>", word)]  # fairseq adds these two
    if len(labels) > num_classes and any(int(dataset[i]["target"]) >= num_classes for i in range(len(dataset))):
        raise SynthesizerError(
            f"--num-classes {num_classes}: the data have {len(labels)} labels ({', '.join(labels)}); give "
            f"--num-classes {len(labels)}"
        )
    return dataset
