"""Loads a checkpoint's model, builds the same model as it was initialised, and makes batches of data."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.nn as nn
from fairseq import checkpoint_utils, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY

from ..errors import SynthesizerError
from ..weights import check_weights
from .attentions import attentions
from .stand_ins import count_embeddings, count_words, set_up_task, set_up_task_on_stand_ins

logger = logging.getLogger(__name__)
Batch = dict[str, Any]


class Loaded(NamedTuple):
    """A checkpoint's model in eval mode, and what it was trained with."""

    path: Path
    cfg: Any  # fairseq's, with common, task, model, criterion
    task: Any
    model: Any  # a fairseq model
    updates: int | None
    data: Path | None  # binarised; None: the dictionaries are made up

    def initial(self) -> nn.Module | None:
        """Returns the model as its training began, or None if that started from another checkpoint's weights.

        The weights are the same because fairseq, too, builds the model right after it has set the seed.
        """
        options = self.cfg.checkpoint
        starts_from_restored = options.reset_optimizer and options.restore_file != "checkpoint_last.pt"
        if options.finetune_from_model or starts_from_restored:
            logger.warning(f"{self.path}: trained from another checkpoint's weights, so there is no initial state")
            return None
        utils.set_torch_seed(self.cfg.common.seed)
        return self.task.build_model(self.cfg.model).float().eval()


def import_user_dir(args: Any) -> None:
    """Imports the code of ``--user-dir``, if it is given.

    Raises:
        SynthesizerError: there is no such folder.
    """
    if args.user_dir is not None and not args.user_dir.is_dir():
        raise SynthesizerError(f"--user-dir {args.user_dir}: no such folder")
    utils.import_user_module(args)


def load(path: Path, data: Path | None = None) -> Loaded:
    """Loads a checkpoint of fairseq-train.

    Args:
        path: the checkpoint.
        data: a folder of binarised data whose dictionaries are the checkpoint's; without it, dictionaries of the
            right size are made up.

    Raises:
        SynthesizerError: the model is no Transformer and no Synthesizer, its weights are no numbers, or the data has
            another vocabulary.
    """
    if not path.is_file():
        raise SynthesizerError(f"{path}: no such checkpoint; give a .pt file of fairseq-train")
    # Attention is measured by position, and positions count from the first token: padding has to be on the right.
    overrides = {"left_pad_source": False, "left_pad_target": False, "eval_bleu": False}
    checkpoint = checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)
    cfg = read_config(path, checkpoint)
    name = check_architecture(path, cfg)
    check_weights(path, checkpoint["model"])
    sizes = count_embeddings(checkpoint["model"])
    embeds_characters = any("embed_tokens.char_embeddings" in key for key in checkpoint["model"])
    if embeds_characters and data is None:
        raise SynthesizerError(f"{path}: embeds the characters of its words, and only its data has those; give --data")
    if not embeds_characters and not sizes:
        raise SynthesizerError(f"{path}: its model {name!r} is no Transformer or Synthesizer: it embeds no tokens")
    if data is None:
        task = set_up_task_on_stand_ins(cfg, sizes)
    else:
        task = set_up_task(cfg, data)
        check_dictionaries(path, data, task, sizes)
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], task=task, state=checkpoint)
    model = models[0].float().eval()
    if not attentions(model):
        raise SynthesizerError(
            f"{path}: its model {name!r} is no Transformer and no Synthesizer of fairseq; only their attention is known"
        )
    history = checkpoint.get("optimizer_history") or [{}]
    return Loaded(path, cfg, task, model, history[-1].get("num_updates"), data)


def read_config(path: Path, checkpoint: dict[str, Any]) -> Any:
    """Returns the config of a checkpoint, of whichever version of fairseq.

    Raises:
        SynthesizerError: the file is no checkpoint of fairseq-train.
    """
    cfg = checkpoint.get("cfg")
    if checkpoint.get("args") is not None:  # the checkpoint of an older version
        cfg = convert_namespace_to_omegaconf(checkpoint["args"])
    if cfg is None or "model" not in checkpoint:
        raise SynthesizerError(f"{path}: not a checkpoint of fairseq-train; give one such as checkpoint_best.pt")
    return cfg


def check_architecture(path: Path, cfg: Any) -> str:
    """Checks that the model is known and has separate attentions, and returns its name.

    Raises:
        SynthesizerError: the model is unknown, or its self-attention also reads the source.
    """
    name = getattr(cfg.model, "_name", None) or getattr(cfg.model, "arch", None)
    if name not in MODEL_REGISTRY and name not in ARCH_MODEL_REGISTRY:
        raise SynthesizerError(f"{path}: its model {name!r} is unknown to fairseq and to this plugin")
    if getattr(cfg.model, "cross_self_attention", False):
        raise SynthesizerError(
            f"{path}: its self-attention also reads the source (--cross-self-attention); only a model trained without "
            "that flag can be read here"
        )
    return str(name)


def check_dictionaries(path: Path, data: Path, task: Any, sizes: dict[str, int]) -> None:
    """Checks that the dictionaries of the data have as many entries as the embeddings.

    Raises:
        SynthesizerError: the sizes differ.
    """
    for embedding, size in sizes.items():
        entries = count_words(task, embedding)
        if entries != size:
            raise SynthesizerError(
                f"--data {data}: its dictionary has {entries} entries, {path} was trained with {size} "
                f"({embedding}); give the data of the training"
            )


def readable(loaded: Loaded, subset: str, sentences: int | None = None, longest: int | None = None) -> list[int]:
    """Loads a subset and returns its first sentences, shortest first, without those that the model cannot take.

    Args:
        loaded: with data.
        subset: the split.
        sentences: how many to take; None for all.
        longest: the most tokens that a sentence may have; None for what the model can take.

    Raises:
        SynthesizerError: there is no such subset, or it has no sentence that the model can take.
    """
    try:
        loaded.task.load_dataset(subset)
    except FileNotFoundError as error:
        raise SynthesizerError(f"--data {loaded.data}: has no split {subset!r}, which is to be read") from error
    dataset = loaded.task.dataset(subset)
    dataset.set_epoch(1)  # masks of a masked language model depend on the epoch; fairseq-validate reads the first
    num_sentences = min(len(dataset), sentences or len(dataset))
    limits = utils.resolve_max_positions(loaded.task.max_positions(), loaded.model.max_positions())
    indices, _ = dataset.filter_indices_by_size(np.arange(num_sentences), limits)
    kept = indices.tolist()
    if longest is not None:
        kept = [i for i in kept if dataset.num_tokens(i) <= longest]
    if len(kept) < num_sentences:
        num_skipped = num_sentences - len(kept)
        logger.warning(f"{loaded.path}: {num_skipped} sentences of {subset} are longer than the model can take")
    if not kept:
        raise SynthesizerError(f"--subset {subset}: no sentence that the model can take (limits: {longest or limits})")
    return sorted(kept, key=lambda i: (dataset.num_tokens(i), i))


def batches(loaded: Loaded, subset: str, order: Sequence[int], max_tokens: int = 4096) -> list[Batch]:
    """Returns sentences in fairseq's batches.

    Args:
        loaded: with data.
        subset: the split, which `readable` has loaded.
        order: what `readable` returns.
        max_tokens: the most tokens of a batch, with padding.
    """
    dataset = loaded.task.dataset(subset)
    groups = dataset.batch_by_size(np.array(order), max_tokens=max_tokens, required_batch_size_multiple=1)
    return [dataset.collater([dataset[i] for i in group]) for group in groups if len(group)]
