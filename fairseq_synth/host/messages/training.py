"""Checks before the first update what would otherwise end a training after its first epoch."""

from collections.abc import Callable
from typing import Any

import fairseq.checkpoint_utils
import numpy as np
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.utils import resolve_max_positions

from ...errors import SynthesizerError
from ...lengths import hint_on_limits, includes_limit_of_synthesizer
from ..repairs import repair


@repair(
    "load_checkpoint",
    fairseq.checkpoint_utils,
    symptom="If a validation sentence is too long for the model, training fails only after the first epoch",
    versions="0.12.2",
)
def check_validation_lengths(original: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_checkpoint`` (``original``): first checks the validation sentences.

    The replacement raises SynthesizerError if a validation sentence is too long for the model. fairseq 0.12.2 notices
    this only after the first epoch. Later versions notice it before the training too, but do not say how many sentences
    of which data set are too long.

    The check has nothing to do with checkpoints. It is made here because ``fairseq-train`` calls this function exactly
    once, before the first update.
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
    """Checks that no validation sentence is longer than the model's limit, or than ``--max-tokens-valid``.

    Some tasks are not checked: those that skip long sentences or form batches in their own way, and those with several
    pairs of languages, whose data sets skip long sentences themselves.

    Args:
        trainer: fairseq's trainer, with the model, the task and its data sets.

    Raises:
        SynthesizerError: a validation set has a sentence that is too long.
    """
    task = trainer.task
    if has_own_batches(task):
        return
    max_tokens = trainer.cfg.dataset.max_tokens_valid
    # fairseq's function returns the lowest of these limits.
    limits = resolve_max_positions(task.max_positions(), trainer.get_model().max_positions(), max_tokens)
    has_several_pairs_of_languages = isinstance(limits, dict)
    if limits is None or has_several_pairs_of_languages:
        return
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
    """Checks that no sentence of a validation set is too long; raises SynthesizerError otherwise.

    Args:
        dataset: the validation set.
        subset: its name in ``--valid-subset``.
        limits: the largest number of tokens of a sentence, or a pair of these for source and target.
        max_tokens: the value of ``--max-tokens-valid``.
    """
    all_indices = np.arange(len(dataset))
    _short_enough, too_long = dataset.filter_indices_by_size(all_indices, limits)
    if len(too_long) == 0:
        return
    first = too_long[0]
    lengths = list_lengths(dataset, first)  # such as [12, 70], of source and target
    limit_set = limits_as_set(limits)  # such as {64}
    has_synth_max_length = includes_limit_of_synthesizer(limit_set)
    # The error consists of three texts. The advice is empty if it is not known which flag to change. The hint is empty
    # if no Synthesizer has the limit.
    advice = advise_flag(max(lengths), max_tokens, has_synth_max_length)
    problem = describe_long_sentences(subset, count=len(too_long), first=first, lengths=lengths, limits=limits)
    hint = hint_on_limits(limit_set)
    raise SynthesizerError(f"{advice}{problem}{hint}")


def describe_long_sentences(subset: str, count: int, first: int, lengths: list[int], limits: Any) -> str:
    """Returns the text of the error about a validation set with sentences that are too long.

    Args:
        subset: the name of the validation set in ``--valid-subset``.
        count: how many sentences are too long.
        first: the index of the first one, from 0.
        lengths: its number of tokens, or those of its source and its target.
        limits: the largest number of tokens of a sentence, or a pair of these for source and target.
    """
    tokens = ", ".join(str(length) for length in lengths)
    # Scripts may look for "max_positions=..." and "skip this example with --skip-...", which are fairseq's own words.
    return (
        f"--valid-subset {subset}: {count} sentences are too long, the first is number {first + 1} "
        f"(its tokens: {tokens}; max_positions={limits}); shorten each, or skip this example with "
        "--skip-invalid-size-inputs-valid-test"
    )


def limits_as_set(limits: Any) -> set[Any]:
    """Returns limits as a set, whether they are a pair for source and target or a single number."""
    return set(limits) if isinstance(limits, (tuple, list)) else {limits}


def list_lengths(dataset: Any, index: int) -> list[int]:
    """Returns the number of tokens of the source and the target of a pair of sentences, or that of a row of text."""
    size = dataset.size(index)
    lengths = size if isinstance(size, tuple) else (size,)
    return [int(length) for length in lengths]


def advise_flag(length: int, max_tokens: int | None, has_synth_max_length: bool) -> str:
    """Returns which flag a user should change so that a sentence is not too long; an empty text if it is not known.

    The text is the beginning of an error, such as "--max-tokens 100: raise it, or --max-tokens-valid; ".

    Args:
        length: the length of the sentence, in tokens.
        max_tokens: the number of tokens that fit into a batch of validation; None if there is no limit.
        has_synth_max_length: whether the sentence is longer than a limit that is some model's ``--synth-max-length``.
    """
    if max_tokens is not None and length > max_tokens:
        # No batch has room for the sentence, so a larger --synth-max-length alone would not help.
        return f"--max-tokens {max_tokens}: raise it, or --max-tokens-valid; "
    if has_synth_max_length:
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

    ``fairseq-train`` keeps the checkpoint that is best by this metric. If validation does not measure the metric, a
    KeyError ends the training after the first epoch, before a checkpoint is saved. The replacement raises
    SynthesizerError instead, before the first update.

    The check has nothing to do with checkpoints. It is made here because ``fairseq-train`` calls this function exactly
    once, before the first update, when the trainer is ready to validate.
    """
    loaded = original(cfg, trainer, **kwargs)
    if will_validate(trainer.cfg):  # `cfg` has only the flags for checkpoints.
        check_metric_is_measured(cfg.best_checkpoint_metric, trainer)
    return loaded


def check_metric_is_measured(metric: str, trainer: Any) -> None:
    """Checks that a validation measures a metric; raises SynthesizerError otherwise.

    Args:
        metric: the value of ``--best-checkpoint-metric``.
        trainer: fairseq's trainer.
    """
    task_flags: Any = getattr(trainer.task, "cfg", None)  # None: the task has no flags
    has_bleu_flag = hasattr(task_flags, "eval_bleu")  # Tasks of translation have the flag --eval-bleu.
    measures_bleu = has_bleu_flag and task_flags.eval_bleu
    if metric == "loss" or (metric == "bleu" and measures_bleu):
        return
    # Any other metric is looked for in the results of a first validation, which takes time.
    measured_metrics = measure_one_batch(trainer)
    if metric in measured_metrics:
        return
    bleu_choice = ", and bleu with --eval-bleu" if has_bleu_flag else ""
    raise SynthesizerError(
        f"--best-checkpoint-metric {metric}: validation does not compute this metric; choose from "
        f"{', '.join(measured_metrics)}{bleu_choice}"
    )


def measure_one_batch(trainer: Any) -> list[str]:
    """Validates the first batch, and returns the names of the metrics that were measured, such as "loss" and "ppl"."""
    first_subset = trainer.cfg.dataset.valid_subset.split(",")[0]
    batches = trainer.get_valid_iterator(first_subset).next_epoch_itr(shuffle=False, set_dataset_epoch=False)
    with metrics.aggregate(new_root=True) as aggregator:
        # All batches are read, because fairseq's thread that loads batches ahead would not end otherwise.
        for i, batch in enumerate(batches):
            if i == 0:
                trainer.valid_step(batch)
    # Names with an underscore at the beginning are counts from which fairseq computes the metrics.
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
    labels = list_labels(self.label_dictionary)
    if len(labels) <= num_classes:
        return dataset
    # There are too few classes for all labels. This is a mistake only if this data set uses a label that has none.
    label_numbers = [int(dataset[i]["target"]) for i in range(len(dataset))]
    if any(number >= num_classes for number in label_numbers):
        raise SynthesizerError(
            f"--num-classes {num_classes}: the data have {len(labels)} labels ({', '.join(labels)}); use "
            f"--num-classes {len(labels)}"
        )
    return dataset


def list_labels(dictionary: Dictionary) -> list[str]:
    """Returns the labels in the dictionary of a classification, without the words that fairseq adds.

    fairseq adds special symbols such as ``<pad>`` at the beginning. At the end, it adds ``<mask>`` and words such as
    ``madeupword0000``, which only fill the dictionary up.
    """
    words = dictionary.symbols[dictionary.nspecial :]
    return [word for word in words if not word.startswith(("madeupword", "<mask>"))]
