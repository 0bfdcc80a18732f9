"""Repairs how fairseq forms batches: no sentence is lost unnoticed, and no batch is longer than its model allows."""

import inspect
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import fairseq.data.audio.raw_audio_dataset
import fairseq.data.bucket_pad_length_dataset
import fairseq.data.data_utils
import numpy as np
from fairseq.data import BucketPadLengthDataset, LanguagePairDataset, LMContextWindowDataset
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import resolve_max_positions

from ...errors import SynthesizerError
from ...lengths import hint_on_limits
from ..repairs import custom_repair, repair


@custom_repair(
    symptom="fairseq fails with numpy 2, because it calls `np.compat.long`, which numpy 2 has removed",
    versions="all versions with numpy >= 2",
)
def restore_numpy_compat() -> bool:
    """Adds ``np.compat.long`` to numpy 2, which has removed it, because fairseq still calls it.

    Returns:
        True if it was added now, False if numpy has ``np.compat``.
    """
    if hasattr(np, "compat"):
        return False
    np.compat = SimpleNamespace(long=int)  # type: ignore[attr-defined]
    return True


def percentile_lacks_interpolation() -> bool:
    """Returns whether ``np.percentile`` refuses the argument ``interpolation``, which fairseq passes to it."""
    try:
        np.percentile([1], 50, interpolation="lower")  # type: ignore[call-overload]
    except TypeError:
        return True
    return False


@repair(
    "get_buckets",
    fairseq.data.data_utils,
    # these two modules have imported the function, so they have a name of their own for it
    fairseq.data.bucket_pad_length_dataset,
    fairseq.data.audio.raw_audio_dataset,
    symptom="`--num-batch-buckets` fails with a TypeError, because `np.percentile` has no argument `interpolation`",
    versions="all versions",
    is_needed=percentile_lacks_interpolation,
)
def find_buckets_with_new_numpy(original: Callable[..., Any], sizes: np.ndarray, num_buckets: int) -> np.ndarray:
    """Replaces ``fairseq.data.data_utils.get_buckets`` (``original``, which is not called) for newer versions of numpy.

    fairseq passes ``interpolation`` to ``np.percentile``. numpy 1.22 has renamed this argument to ``method``, and later
    versions refuse the old name.

    Args:
        original: fairseq's function.
        sizes: the length of each sentence.
        num_buckets: how many groups of sentences of similar length to form; fewer if several would be equal.

    Returns:
        The length of the longest sentence in each bucket, in ascending order.
    """
    percentages = np.linspace(0, 100, num_buckets + 1)
    boundaries = np.percentile(sizes, percentages, method="lower")  # "lower": each is the length of some sentence
    upper_bounds = boundaries[1:]  # the first boundary, at 0 percent, is the shortest sentence
    return np.unique(upper_bounds)  # without repetitions


def drops_last_batch() -> bool:
    """Returns whether this fairseq forms no batch at all of three sentences, because they are fewer than eight."""
    sentences = np.arange(3)
    batches = fairseq.data.data_utils.batch_by_size(
        sentences, None, num_tokens_vec=sentences, max_sentences=8, required_batch_size_multiple=8
    )
    return len(batches) == 0


@repair(
    "batch_by_size",
    fairseq.data.data_utils,
    symptom="fairseq drops the last n mod 8 sentences of every data set",
    versions="after 0.12.2; its issue #5036",
    is_needed=drops_last_batch,
)
def keep_last_batch(
    original: Callable[..., Any], indices: Iterable[int], *args: Any, **kwargs: Any
) -> list[np.ndarray]:
    """Replaces ``fairseq.data.data_utils.batch_by_size`` (``original``): no sentence is left out of the batches.

    fairseq leaves out the last batch if its number of sentences is not a multiple of ``required_batch_size_multiple``,
    8 by default. With 100 test sentences, only 96 would be translated.

    Args:
        original: fairseq's function.
        indices: the numbers of the sentences, in the order in which they are put into batches.
        args, kwargs: the other arguments of fairseq's function.

    Returns:
        The batches. Each is an array with the numbers of its sentences.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)  # -1: up to the end
    if len(indices) == 0:
        return []
    batches = list(original(indices, *args, **kwargs))
    arguments = name_arguments(original, indices, *args, **kwargs)
    if arguments.get("fixed_shapes") is not None:
        return batches  # Batches of fixed shapes are formed in another way, which leaves out no sentence.
    left_out = list_sentences_left_out(indices, batches)
    if len(left_out) > 0:
        batches.append(left_out)
    return batches


def list_sentences_left_out(sentences: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
    """Returns the sentences that are in no batch: of [5, 2, 7, 4], with the batch [5, 2], these are [7, 4].

    Args:
        sentences: the numbers of the sentences, in the order in which they were put into batches. So those that are
            left out are at the end.
        batches: the numbers of the sentences of each batch.
    """
    num_sentences_in_batches = sum(len(batch) for batch in batches)
    return sentences[num_sentences_in_batches:]


def name_arguments(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns {name: value} of the arguments of the call ``function(*args, **kwargs)``, without calling the function.

    For example, ``name_arguments(pow, 2, exp=3)`` returns {"base": 2, "exp": 3}.
    """
    return inspect.signature(function).bind(*args, **kwargs).arguments


@repair(
    "filter_indices_by_size",
    LanguagePairDataset,
    symptom="With `--num-batch-buckets`, sentences that fit the model are skipped as too long",
    versions="all versions",
)
def keep_bucketed_sentences(
    original: Callable[..., Any], self: LanguagePairDataset, indices: np.ndarray, max_sizes: Any
) -> Any:
    """Replaces ``LanguagePairDataset.filter_indices_by_size`` (``original``): skips no sentence that fits the model.

    With ``--num-batch-buckets``, fairseq pads sentences of similar length to the longest of them, and compares the
    padded lengths with the limits of the model. For example, sentences of 5, 9 and 12 tokens are padded to 12 tokens.
    If the limit is 10, fairseq skips all three. The replacement first shortens the padding of the first two to 10
    tokens. Then fairseq skips only the third.

    Args:
        original: fairseq's method.
        self: the data set; its padding is changed in place.
        indices: the numbers of the sentences to check.
        max_sizes: the model's limits in tokens: a number, a pair of numbers for source and target, or None.

    Returns:
        What the original returns: the numbers of the sentences to keep, and those of the sentences to skip.
    """
    has_buckets = self.buckets is not None
    if has_buckets and max_sizes is not None:
        if isinstance(max_sizes, (tuple, list)):
            max_source_length, max_target_length = max_sizes
        else:
            max_source_length = max_target_length = max_sizes
        shorten_padding(self, max_source_length=max_source_length, max_target_length=max_target_length)
    return original(self, indices, max_sizes)


def shorten_padding(dataset: LanguagePairDataset, max_source_length: float, max_target_length: float) -> None:
    """Changes a data set in place: no sentence that fits the model is padded beyond the limits of the model.

    Args:
        dataset: pairs of sentences. With ``--num-batch-buckets``, fairseq has grouped them into buckets by length, and
            has padded each sentence to the longest one of its bucket.
        max_source_length: the longest source that the model takes, in tokens.
        max_target_length: the longest target that the model takes, in tokens.
    """
    lengths = dataset.sizes  # without padding; (sentences, 2) if there are targets, otherwise (sentences,)
    has_targets = dataset.tgt_sizes is not None
    if has_targets:
        shorten_padding_of_side(dataset.src, lengths=lengths[:, 0], max_length=max_source_length)
        shorten_padding_of_side(dataset.tgt, lengths=lengths[:, 1], max_length=max_target_length)
    else:
        shorten_padding_of_side(dataset.src, lengths=lengths, max_length=max_source_length)
    update_buckets(dataset)


def update_buckets(dataset: LanguagePairDataset) -> None:
    """Computes the buckets of a data set again, as the constructor of LanguagePairDataset does, from padded lengths."""
    dataset.bucketed_num_tokens = dataset.num_tokens_vec(np.arange(len(dataset)))
    # For each bucket, fairseq has a pair: None, and the number of tokens to which its sentences are padded.
    dataset.buckets = [(None, num_tokens) for num_tokens in np.unique(dataset.bucketed_num_tokens)]


def shorten_padding_of_side(side: BucketPadLengthDataset, lengths: np.ndarray, max_length: float) -> None:
    """Shortens the padded lengths of all source sentences, or of all target sentences, to `max_length`, in place.

    Sentences of more than `max_length` tokens are not changed. For example, three sentences of 5, 9 and 12 tokens are
    all padded to 12 tokens. If `max_length` is 10, they are then padded to 10, 10 and 12 tokens.

    Args:
        side: the source or target sentences; ``side.sizes`` has the padded length of each sentence.
        lengths: the length of each sentence without padding.
        max_length: the longest sentence that the model takes; infinite if it takes sentences of any length.
    """
    if max_length == math.inf:
        return
    fits_model = lengths <= max_length  # True or False for each sentence
    is_padded_too_far = fits_model & (side.sizes > max_length)
    # The array itself is changed, because the data set also has it as its attribute src_sizes or tgt_sizes.
    side.sizes[is_padded_too_far] = max_length


@repair(
    "get_batch_iterator",
    FairseqTask,
    symptom="`--skip-invalid-size-inputs-valid-test` does not skip sentences longer than `--max-tokens`",
    versions="all versions",
)
def skip_sentences_over_max_tokens(
    original: Callable[..., Any], self: FairseqTask, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``FairseqTask.get_batch_iterator`` (``original``): skips sentences of more than ``--max-tokens``.

    With ``--skip-invalid-size-inputs-valid-test``, fairseq skips validation and test sentences that are too long for
    the model, but not those that are too long for a batch. These end the command in an AssertionError. The replacement
    lowers the limit of the model to that of a batch.
    """
    model_limits = kwargs.get("max_positions")
    max_tokens = kwargs.get("max_tokens")
    skips_long_sentences = kwargs.get("ignore_invalid_inputs")
    if skips_long_sentences and model_limits is not None and max_tokens is not None:
        # fairseq's function returns the lower one of both limits.
        kwargs["max_positions"] = resolve_max_positions(model_limits, max_tokens)
    return original(self, dataset, *args, **kwargs)


@repair(
    "collater",
    LMContextWindowDataset,
    symptom="With `--context-window`, every batch is padded by the size of the window, even if no row needs padding",
    versions="all versions",
)
def cut_context_padding(original: Callable[..., Any], self: LMContextWindowDataset, samples: Any) -> Any:
    """Replaces ``LMContextWindowDataset.collater`` (``original``): pads a batch only up to its longest row.

    With ``--context-window W``, each row of text begins with up to W of the last tokens of the row before it. fairseq
    pads every batch to the length of its longest row plus W, even if no row gets so many tokens. A model with a longest
    sentence would refuse such a batch, although each of its rows fits.
    """
    batch = original(self, samples)
    tokens = batch["net_input"]["src_tokens"]  # (rows, tokens), with the padding on the right
    row_lengths = tokens.ne(self.pad_idx).sum(dim=1)
    longest = int(row_lengths.max())
    batch["net_input"]["src_tokens"] = tokens[:, :longest]
    batch["target"] = batch["target"][:, :longest]  # It has the same shape, because each token predicts the next one.
    return batch


@repair(
    "eval_lm_dataloader",
    LanguageModelingTask,
    symptom="`fairseq-eval-lm` silently skips rows that are longer than the model's limit",
    versions="all versions",
)
def refuse_rows_left_out(
    original: Callable[..., Any], self: LanguageModelingTask, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``LanguageModelingTask.eval_lm_dataloader`` (``original``): refuses rows that the model cannot take.

    ``fairseq-eval-lm`` cuts a text into rows of ``--tokens-per-sample`` tokens, 1024 by default. fairseq leaves out
    rows that are longer than the model's limit. For a model with a limit of 512 tokens, it would leave out all rows of
    1024 tokens, and score only the last, shorter row. The replacement raises SynthesizerError instead.
    """
    arguments = name_arguments(original, self, dataset, *args, **kwargs)
    limit = arguments.get("max_positions")  # the limit of a language model is a whole number
    if isinstance(limit, int):
        check_row_lengths(self, dataset, limit)
    return original(self, dataset, *args, **kwargs)


def check_row_lengths(task: LanguageModelingTask, dataset: Any, limit: int) -> None:
    """Checks that no row of a text is longer than `limit` tokens; raises SynthesizerError otherwise.

    Args:
        task: the task, which has the flag ``--add-bos-token``.
        dataset: the rows.
        limit: the number of tokens in the longest row that the model takes.
    """
    row_lengths = np.asarray(dataset.sizes)
    num_too_long = int((row_lengths > limit).sum())
    if num_too_long == 0:
        return
    accepted = f"the {limit} tokens that the model accepts"
    if getattr(task.args, "add_bos_token", False):
        accepted += " in addition to the token of --add-bos-token"  # neither the limit nor a length counts this token
    message = (
        f"--tokens-per-sample: {num_too_long} of {len(dataset)} blocks are longer than {accepted}, and fairseq would "
        f"skip them; use at most {limit}, and also --sample-break-mode none if single sentences are longer"
    )
    hint = hint_on_limits({limit})  # empty if no Synthesizer has this limit
    raise SynthesizerError(message + hint)
