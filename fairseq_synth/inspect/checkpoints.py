"""Loads the model of a checkpoint, builds the same model as it was before its training, and makes batches of data."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.nn as nn
from fairseq import checkpoint_utils, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from torch import Tensor

from ..errors import SynthesizerError
from ..weights import check_weights
from .attentions import attentions
from .stand_ins import count_embeddings, count_words, set_up_task, set_up_task_on_made_up_words

logger = logging.getLogger(__name__)
OWN_CHECKPOINT = "checkpoint_last.pt"  # the default of --restore-file: the latest checkpoint of the training itself
Batch = dict[str, Any]  # a batch as a data set of fairseq makes it, with `net_input`, the arguments of the model


class Loaded(NamedTuple):
    """The model of a checkpoint in eval mode, and what it was trained with."""

    path: Path
    cfg: Any  # fairseq's config, with common, task, model, criterion
    task: Any
    model: Any  # a fairseq model
    updates: int | None
    data: Path | None  # the folder of binarised data; None: the dictionaries are made up

    def build_initial_model(self) -> nn.Module | None:
        """Builds the model again as it was before the first update of its training.

        It has the same weights as it had then: fairseq, too, builds the model right after it has set the seed.

        Returns:
            the model; None if its training began with the weights of another checkpoint, which are not known here.
        """
        if begins_with_other_weights(self.cfg.checkpoint):
            logger.warning(f"{self.path}: trained from another checkpoint, so its state before training is unknown")
            return None
        utils.set_torch_seed(self.cfg.common.seed)
        return self.task.build_model(self.cfg.model).float().eval()


def begins_with_other_weights(options: Any) -> bool:
    """Returns whether a training began with the weights that another training had learned.

    This is the case with ``--finetune-from-model``. It is also the case if ``--restore-file`` is given together with
    ``--reset-optimizer``. With ``--restore-file`` alone, a training is only continued.

    Args:
        options: fairseq's config of the training's checkpoints.
    """
    is_finetuned = bool(options.finetune_from_model)
    has_restore_file = options.restore_file != OWN_CHECKPOINT  # the default
    resets_optimizer = bool(options.reset_optimizer)
    return is_finetuned or (has_restore_file and resets_optimizer)


def import_user_dir(args: Any) -> None:
    """Imports the user's own code from the folder ``args.user_dir``, unless it is None.

    Raises:
        SynthesizerError: there is no such folder.
    """
    if args.user_dir is not None and not args.user_dir.is_dir():
        raise SynthesizerError(f"--user-dir {args.user_dir}: no such folder")
    utils.import_user_module(args)


def load(path: Path, data: Path | None = None) -> Loaded:
    """Loads the model of a checkpoint that fairseq-train has written.

    Args:
        path: the checkpoint.
        data: a folder of binarised data that has the dictionaries of the training; without it, dictionaries of the
            right size are made up.

    Raises:
        SynthesizerError: the model is neither a Transformer nor a Synthesizer, a weight is NaN or infinite, or the
            dictionaries of the data have other sizes.
    """
    checkpoint = read_checkpoint(path)
    cfg = read_config(path, checkpoint)
    weights = checkpoint["model"]
    model_name = check_architecture(path, cfg)
    check_weights(path, weights)
    check_embeddings(path, model_name, weights, has_data=data is not None)
    task = set_up_task_of_checkpoint(path, cfg, weights, data)
    # `path` is not read again, since `checkpoint` has the contents of the file already.
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], task=task, state=checkpoint)
    model = models[0].float().eval()
    if not attentions(model):
        raise SynthesizerError(
            f"{path}: its model {model_name!r} is neither a Transformer nor a Synthesizer, and no other "
            "attention is supported"
        )
    return Loaded(path=path, cfg=cfg, task=task, model=model, updates=read_num_updates(checkpoint), data=data)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Returns the contents of a checkpoint, in whose config a few options are changed for an inspection.

    Raises:
        SynthesizerError: there is no such file.
    """
    if not path.is_file():
        raise SynthesizerError(f"{path}: no such checkpoint; use a .pt file of fairseq-train")
    changed_options = {
        # Attention is measured by position, and positions count from the first token: padding has to be on the right.
        "left_pad_source": False,
        "left_pad_target": False,
        # The task then does not load the tokenizer and the beam search, which only its validation needs.
        "eval_bleu": False,
    }
    checkpoint: dict[str, Any] = checkpoint_utils.load_checkpoint_to_cpu(str(path), changed_options)
    return checkpoint


def read_config(path: Path, checkpoint: dict[str, Any]) -> Any:
    """Returns the config of a checkpoint in today's form, also if an older version of fairseq has written it.

    Raises:
        SynthesizerError: the file is no checkpoint of fairseq-train.
    """
    if checkpoint.get("args") is not None:  # an older version stored the command line instead of a config
        cfg = convert_namespace_to_omegaconf(checkpoint["args"])
    else:
        cfg = checkpoint.get("cfg")
    if cfg is None or "model" not in checkpoint:
        raise SynthesizerError(f"{path}: not a checkpoint of fairseq-train; use a file such as checkpoint_best.pt")
    return cfg


def read_num_updates(checkpoint: dict[str, Any]) -> int | None:
    """Returns the number of updates after which a checkpoint was written, or None if the checkpoint does not say."""
    history = checkpoint.get("optimizer_history")
    if not history:
        return None
    num_updates: int | None = history[-1].get("num_updates")
    return num_updates


def check_architecture(path: Path, cfg: Any) -> str:
    """Checks that the model can be inspected, and returns the name of its architecture.

    Raises:
        SynthesizerError: neither fairseq nor this plugin has the architecture, or its self-attention also reads the
            source.
    """
    name = getattr(cfg.model, "_name", None) or getattr(cfg.model, "arch", None)  # older checkpoints have only `arch`
    # It is the name of a class of models, such as "transformer", or of a model in a certain size.
    is_known = name in MODEL_REGISTRY or name in ARCH_MODEL_REGISTRY
    if not is_known:
        raise SynthesizerError(f"{path}: its model {name!r} is unknown to fairseq and to this plugin")
    if getattr(cfg.model, "cross_self_attention", False):
        raise SynthesizerError(
            f"{path}: its self-attention also reads the source (--cross-self-attention); only models trained without "
            "that flag are supported"
        )
    return str(name)


def check_embeddings(path: Path, model_name: str, weights: dict[str, Tensor], has_data: bool) -> None:
    """Checks that a model has embeddings of tokens, or, if the data are given, embeddings of the characters of words.

    Without data, a dictionary is made up. Its size is the number of embedded tokens. A model that computes the vector
    of a word from its characters does not have this number. So it needs the dictionary of the data.

    Args:
        path: the checkpoint, for the error message.
        model_name: the name of its architecture, for the error message.
        weights: the model's state dict.
        has_data: whether the user has given the data.

    Raises:
        SynthesizerError: the model embeds no tokens, or it embeds characters and there is no data.
    """
    embeds_characters = any("embed_tokens.char_embeddings" in name for name in weights)
    embeds_words = bool(count_embeddings(weights))
    if not embeds_words and not embeds_characters:
        raise SynthesizerError(
            f"{path}: its model {model_name!r} is not a Transformer or Synthesizer, because it embeds no tokens"
        )
    if embeds_characters and not has_data:
        raise SynthesizerError(
            f"{path}: its model embeds the characters of words, and only the data contain these words; add --data"
        )


def set_up_task_of_checkpoint(path: Path, cfg: Any, weights: dict[str, Tensor], data: Path | None) -> Any:
    """Returns the task of a checkpoint, with the dictionaries of the data, or without data with made-up dictionaries.

    Args:
        path: the checkpoint, for error messages.
        cfg: its config.
        weights: its model's state dict, which says how large the dictionaries are.
        data: the folder of the data, or None.

    Raises:
        SynthesizerError: the data cannot be used, or its dictionaries have other sizes than the embeddings.
    """
    sizes = count_embeddings(weights)
    if data is None:
        return set_up_task_on_made_up_words(cfg, sizes)
    task = set_up_task(cfg, data)
    check_dictionaries(path, data, task, sizes)
    return task


def check_dictionaries(path: Path, data: Path, task: Any, sizes: dict[str, int]) -> None:
    """Checks that the dictionaries of the data have as many entries as the embeddings of the model.

    Args:
        path: the checkpoint, for the error message.
        data: the folder of the data, for the error message.
        task: the task with the dictionaries.
        sizes: {name of an embedding: its number of entries}.

    Raises:
        SynthesizerError: the sizes differ.
    """
    for embedding, size in sizes.items():
        num_words = count_words(task, embedding)
        if num_words != size:
            raise SynthesizerError(
                f"--data {data}: its dictionary has {num_words} entries, but {path} was trained with {size} "
                f"({embedding}); use the data that it was trained on"
            )


def readable(loaded: Loaded, subset: str, sentences: int | None = None, longest: int | None = None) -> list[int]:
    """Loads a split of the data, and returns the indices of the sentences that the model can read, shortest first.

    Sentences that are too long for the model, or longer than `longest`, are left out, with a warning.

    Args:
        loaded: the model, with data.
        subset: the split.
        sentences: how many sentences of the split to take, from its beginning; None for all.
        longest: the most tokens that a sentence may have; None if only the model has limits.

    Raises:
        SynthesizerError: there is no such split, or all of its sentences are too long.
    """
    dataset = load_dataset(loaded, subset)
    num_sentences = len(dataset)
    if sentences:
        num_sentences = min(num_sentences, sentences)
    # A number of tokens or, with encoder and decoder, one for the source and one for the target.
    limits_of_model = utils.resolve_max_positions(loaded.task.max_positions(), loaded.model.max_positions())
    indices = find_short_sentences(dataset, num_sentences, limits_of_model, longest)
    num_too_long = num_sentences - len(indices)
    if num_too_long > 0:
        logger.warning(
            f"{loaded.path}: {num_too_long} sentences of {subset} are too long for the model and are skipped"
        )
    if not indices:
        limits = limits_of_model if longest is None else longest
        raise SynthesizerError(f"--subset {subset}: all sentences are too long (limits: {limits})")
    return sorted(indices, key=lambda index: (dataset.num_tokens(index), index))


def find_short_sentences(dataset: Any, num_sentences: int, limits_of_model: Any, longest: int | None) -> list[int]:
    """Returns the indices of those of the first sentences of a data set that are not too long.

    Args:
        dataset: a data set of fairseq.
        num_sentences: how many sentences to take from its beginning.
        limits_of_model: how many tokens the model can read, or a pair of these for source and target.
        longest: another limit, in tokens, or None.
    """
    indices_within_limits, _too_long = dataset.filter_indices_by_size(np.arange(num_sentences), limits_of_model)
    indices: list[int] = indices_within_limits.tolist()
    if longest is None:
        return indices
    return [index for index in indices if dataset.num_tokens(index) <= longest]


def load_dataset(loaded: Loaded, subset: str) -> Any:
    """Loads a split of a model's data and returns it as a data set of fairseq.

    Raises:
        SynthesizerError: there is no such split.
    """
    try:
        loaded.task.load_dataset(subset)
    except FileNotFoundError as error:
        raise SynthesizerError(f"--data {loaded.data}: has no split {subset!r}") from error
    dataset = loaded.task.dataset(subset)
    dataset.set_epoch(1)  # masks of a masked language model depend on the epoch; fairseq-validate reads the first
    return dataset


def batches(loaded: Loaded, subset: str, sentence_indices: Sequence[int], max_tokens: int = 4096) -> list[Batch]:
    """Returns sentences of the data in batches, as fairseq makes them.

    Args:
        loaded: the model, with data.
        subset: a split that `readable` has loaded.
        sentence_indices: the sentences to take, sorted by length, as `readable` returns them.
        max_tokens: the most tokens of a batch, with padding.
    """
    dataset = loaded.task.dataset(subset)
    # With the multiple 1, a batch may have any number of sentences.
    indices_of_batches = dataset.batch_by_size(
        np.array(sentence_indices), max_tokens=max_tokens, required_batch_size_multiple=1
    )
    result = []
    for indices in indices_of_batches:
        if len(indices) > 0:
            result.append(dataset.collater([dataset[index] for index in indices]))
    return result


def list_inputs(batch: Batch) -> list[Tensor]:
    """Returns the tokens that the model reads: the source (B, S) and, if there is one, the decoder's input (B, T)."""
    net_input = batch["net_input"]
    inputs = [net_input["src_tokens"]]
    if "prev_output_tokens" in net_input:
        inputs.append(net_input["prev_output_tokens"])
    return inputs


def stack_tokens(batch: Batch, stack: str) -> Tensor:
    """Returns the tokens (B, T) that one stack of the model reads.

    Args:
        batch: a batch of fairseq.
        stack: ``encoder`` or ``decoder``. The decoder of a language model, which has no encoder, reads the source.
    """
    net_input = batch["net_input"]
    if stack == "decoder" and "prev_output_tokens" in net_input:
        tokens: Tensor = net_input["prev_output_tokens"]
    else:
        tokens = net_input["src_tokens"]
    return tokens
