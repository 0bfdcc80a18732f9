"""Checks before the first update what would otherwise end a training after its first epoch."""

import re
from collections.abc import Callable
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
    symptom="If a validation sentence is too long for the model, training fails only after the first epoch",
    versions="0.12.2",
)
def check_validation_lengths(original: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_checkpoint`` (``original``): first checks the validation sentences.

    ``fairseq-train`` calls this function once, before the first update. The replacement raises SynthesizerError if a
    validation sentence is too long for the model. fairseq 0.12.2 notices this only after the first epoch. Later
    versions notice it before the training too, but do not say how many sentences of which data set are too long.
    """
    skips_long_sentences = trainer.cfg.dataset.skip_invalid_size_inputs_valid_test
    if will_validate(trainer.cfg) and not skips_long_sentences:
        check_lengths(trainer)
    return original(cfg, trainer, **kwargs)


def will_validate(cfg: Any) -> bool:
    """Returns whether a training with this configuration validates at least once before it ends."""
    max_update = cfg.optimization.max_update or 0  # 0 is no limit
    ends_before_first_validation = 0 < max_update < cfg.dataset.validate_after_updates
    return not cfg.dataset.disable_validation and not ends_before_first_validation


def check_lengths(trainer: Any) -> None:
    """Checks that no validation sentence is longer than the model's limit, or than ``--max-tokens``.

    Nothing is checked if the task has its own way to skip sentences or to form batches.

    Args:
        trainer: fairseq's trainer, with the model, the task and its data sets.

    Raises:
        SynthesizerError: the first validation set with a sentence that is too long.
    """
    task = trainer.task
    if has_own_batches(task):
        return
    max_tokens = trainer.cfg.dataset.max_tokens_valid
    limits = resolve_max_positions(task.max_positions(), trainer.get_model().max_positions(), max_tokens)
    if limits is None or isinstance(limits, dict):
        return  # a dict has the limits of several pairs of languages, whose data sets skip long sentences themselves
    for subset in trainer.cfg.dataset.valid_subset.split(","):
        if subset in task.datasets:
            check_subset_lengths(task.dataset(subset), subset=subset, limits=limits, max_tokens=max_tokens)


def has_own_batches(task: FairseqTask) -> bool:
    """Returns whether the class of a task overrides how fairseq skips long sentences or forms batches."""
    task_class = type(task)
    skips_in_its_way = task_class.filter_indices_by_size is not FairseqTask.filter_indices_by_size
    forms_batches_in_its_way = task_class.get_batch_iterator is not FairseqTask.get_batch_iterator
    return skips_in_its_way or forms_batches_in_its_way


def check_subset_lengths(dataset: Any, subset: str, limits: Any, max_tokens: int | None) -> None:
    """Checks the lengths of one validation set; raises SynthesizerError if a sentence is too long.

    Args:
        dataset: the validation set.
        subset: its name in ``--valid-subset``.
        limits: the largest number of tokens of a sentence, or a pair of these for source and target.
        max_tokens: the value of ``--max-tokens-valid``.
    """
    _, too_long = dataset.filter_indices_by_size(np.arange(len(dataset)), limits)
    if len(too_long) == 0:
        return
    first = too_long[0]
    size = dataset.size(first)
    lengths = size if isinstance(size, tuple) else (size,)
    limit = f"max_positions={limits}"
    hint = length_hint(limit)
    is_synthesizers_limit = hint != ""
    advice = advise_on_length(max(lengths), max_tokens, is_synthesizers_limit)
    tokens = ", ".join(str(int(length)) for length in lengths)
    # "skip this example with --skip-..." are fairseq's own words, which scripts may look for
    raise SynthesizerError(
        f"{advice}--valid-subset {subset}: {len(too_long)} sentences are too long, the first is number {first + 1} "
        f"(its tokens: {tokens}; {limit}); shorten each, or skip this example with "
        f"--skip-invalid-size-inputs-valid-test{hint}"
    )


def advise_on_length(length: int, max_tokens: int | None, is_synthesizers_limit: bool) -> str:
    """Returns the beginning of an error line, which says how sentences that are too long can be used; or nothing.

    Args:
        length: the length of a sentence that is too long, in tokens.
        max_tokens: the value of ``--max-tokens-valid``.
        is_synthesizers_limit: whether the sentence is longer than ``--synth-max-length``.
    """
    if max_tokens is not None and length > max_tokens:
        # The sentence does not fit into a batch, so a larger limit of the model alone would not help.
        return f"--max-tokens {max_tokens}: raise it, or --max-tokens-valid; "
    if is_synthesizers_limit:
        return "--synth-max-length: train with a larger one; "
    return ""


@repair(
    "load_checkpoint",
    fairseq.checkpoint_utils,
    symptom="If validation does not compute `--best-checkpoint-metric`, training fails before its first checkpoint",
    versions="all versions",
)
def check_best_metric(original: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_checkpoint`` (``original``): checks ``--best-checkpoint-metric``.

    ``fairseq-train`` calls this function once, before the first update. The replacement raises SynthesizerError if
    validation does not measure the metric. Without it, a KeyError ends the first epoch before its checkpoint is saved.

    The metric "loss" is always measured, and "bleu" with ``--eval-bleu``. For any other metric, one batch is validated
    to see what is measured.
    """
    loaded = original(cfg, trainer, **kwargs)
    metric = cfg.best_checkpoint_metric
    task_flags = getattr(trainer.task, "cfg", None)  # None: the task has no flags
    measures_bleu = getattr(task_flags, "eval_bleu", False)
    is_known = metric == "loss" or (metric == "bleu" and measures_bleu)
    if is_known or not will_validate(trainer.cfg):
        return loaded
    measured = find_metrics(trainer)
    if metric not in measured:
        can_measure_bleu = hasattr(task_flags, "eval_bleu")
        bleu_choice = ", and bleu with --eval-bleu" if can_measure_bleu else ""
        raise SynthesizerError(
            f"--best-checkpoint-metric {metric}: validation does not compute this metric; choose from "
            f"{', '.join(measured)}{bleu_choice}"
        )
    return loaded


def find_metrics(trainer: Any) -> list[str]:
    """Returns the names of the metrics that a validation measures, which it finds by validating one batch."""
    first_subset = trainer.cfg.dataset.valid_subset.split(",")[0]
    batches = trainer.get_valid_iterator(first_subset).next_epoch_itr(shuffle=False, set_dataset_epoch=False)
    with metrics.aggregate(new_root=True) as aggregator:
        # All batches are read, because fairseq's thread that loads batches ahead would not end otherwise.
        for i, batch in enumerate(batches):
            if i == 0:
                trainer.valid_step(batch)
    return [name for name in aggregator.get_smoothed_values() if not name.startswith("_")]


@repair(
    "load_dataset",
    SentencePredictionTask,
    symptom="If `--num-classes` is too small, training fails with an IndexError, or on a GPU with a CUDA assertion",
    versions="all versions",
)
def check_classes(
    original: Callable[..., Any], self: SentencePredictionTask, split: str, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``SentencePredictionTask.load_dataset`` (``original``): checks that ``--num-classes`` is large enough.

    Raises SynthesizerError if the data set has a label whose number is ``--num-classes`` or more. Without the
    replacement, such a label ends the training in an IndexError, or on a GPU in an assertion of CUDA.
    """
    dataset = original(self, split, *args, **kwargs)
    if self.cfg.regression_target:
        return dataset
    num_classes = self.cfg.num_classes
    words = self.label_dictionary.symbols[self.label_dictionary.nspecial :]
    labels = [word for word in words if not re.match("madeupword|<mask>", word)]  # fairseq adds these two
    if len(labels) <= num_classes:
        return dataset
    # More labels than classes are no mistake if this data set does not use the labels with the highest numbers.
    label_numbers = [int(dataset[i]["target"]) for i in range(len(dataset))]
    if any(number >= num_classes for number in label_numbers):
        raise SynthesizerError(
            f"--num-classes {num_classes}: the data have {len(labels)} labels ({', '.join(labels)}); use "
            f"--num-classes {len(labels)}"
        )
    return dataset
