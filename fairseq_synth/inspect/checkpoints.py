"""From a checkpoint to a model as trained, the same model as initialised, and batches of data."""

import logging
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.nn as nn
from fairseq import checkpoint_utils, tasks, utils
from fairseq.data.data_utils import infer_language_pair
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from torch import Tensor

from ..errors import SynthesizerError
from ..weights import check_weights
from .hooks import attentions

logger = logging.getLogger(__name__)
Batch = dict[str, Any]


class Loaded(NamedTuple):
    """A checkpoint's model in eval mode, and what it was trained with."""

    path: Path
    cfg: Any  # fairseq's, with common, task, model, criterion
    task: Any
    model: Any  # a fairseq model
    updates: int | None
    data: Path | None  # binarised; None: the dictionaries are stand-ins

    def initial(self) -> nn.Module | None:
        """The model as its training began: fairseq builds it right after it has set the seed.

        None for a training that started from another checkpoint's weights.
        """
        start = self.cfg.checkpoint
        if start.finetune_from_model or (start.reset_optimizer and start.restore_file != "checkpoint_last.pt"):
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
        data: a folder of binarised data whose dictionaries are the checkpoint's; without one, dictionaries of the
            right size are made up.

    Raises:
        SynthesizerError: the model is no Transformer and no Synthesizer, or the data has another vocabulary.
    """
    if not path.is_file():
        raise SynthesizerError(f"{path}: no such checkpoint; give a .pt file of fairseq-train")
    # positions count from the first token, so padding is on the right
    settings = {"left_pad_source": False, "left_pad_target": False, "eval_bleu": False}
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path), settings)
    cfg = state.get("cfg")
    if state.get("args") is not None:
        cfg = convert_namespace_to_omegaconf(state["args"])
    if cfg is None or "model" not in state:
        raise SynthesizerError(f"{path}: not a checkpoint of fairseq-train; give one such as checkpoint_best.pt")
    name = getattr(cfg.model, "_name", None) or getattr(cfg.model, "arch", None)
    if name not in MODEL_REGISTRY and name not in ARCH_MODEL_REGISTRY:
        raise SynthesizerError(f"{path}: its model {name!r} is unknown to fairseq and to this plugin")
    if getattr(cfg.model, "cross_self_attention", False):
        raise SynthesizerError(
            f"{path}: its self-attention also reads the source (--cross-self-attention); only a model trained without "
            "that flag can be read here"
        )
    check_weights(path, state["model"])
    sizes = embedding_sizes(state["model"])
    if any("embed_tokens.char_embeddings" in key for key in state["model"]):
        if data is None:
            raise SynthesizerError(
                f"{path}: embeds the characters of its words, and only its data has those; give --data"
            )
    elif not sizes:
        raise SynthesizerError(f"{path}: its model {name!r} is no Transformer or Synthesizer: it embeds no tokens")
    task = task_on_stand_ins(cfg, sizes) if data is None else set_up_task(cfg, data)
    for key, size in sizes.items():
        entries = dictionary_size(task, key)
        if entries != size:
            raise SynthesizerError(
                f"--data {data}: its dictionary has {entries} entries, {path} was trained with {size} "
                f"({key}); give the data of the training"
            )
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], task=task, state=state)
    model = models[0].float().eval()
    if not attentions(model):
        raise SynthesizerError(
            f"{path}: its model {name!r} is no Transformer and no Synthesizer of fairseq; only their attention is known"
        )
    history = state.get("optimizer_history") or [{}]
    return Loaded(path, cfg, task, model, history[-1].get("num_updates"), data)


def embedding_sizes(weights: dict[str, Tensor]) -> dict[str, int]:
    """{embedding of tokens: its number of entries}; that of adaptive input has several tables."""
    sizes: dict[str, int] = {}
    for key, value in weights.items():
        found = re.fullmatch(r"(.*embed_tokens)\.(?:weight|embeddings\.\d+\.0\.weight)", key)
        if found:
            sizes[found[1]] = sizes.get(found[1], 0) + len(value)
    return sizes


def task_on_stand_ins(cfg: Any, sizes: dict[str, int]) -> Any:
    """The checkpoint's task on dictionaries of made-up words, as large as its embeddings."""
    if hasattr(cfg.task, "source_lang") and cfg.task.source_lang is None:
        cfg.task.source_lang, cfg.task.target_lang = "source", "target"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_dictionaries(folder, cfg.task, sizes)
        task = set_up_task(cfg, folder)
        surplus = {key: dictionary_size(task, key) - size for key, size in sizes.items()}
        if any(surplus.values()):  # some tasks add a token of their own
            make_dictionaries(folder, cfg.task, {key: size - surplus[key] for key, size in sizes.items()})
            task = set_up_task(cfg, folder)
    return task


def set_up_task(cfg: Any, data: Path) -> Any:
    """The checkpoint's task on the dictionaries of a folder."""
    cfg.task.data = str(data)
    if not data.is_dir():
        raise SynthesizerError(f"--data {data}: no such folder; give the one of fairseq-preprocess")
    if hasattr(cfg.task, "source_lang") and not (cfg.task.source_lang and cfg.task.target_lang):
        cfg.task.source_lang, cfg.task.target_lang = infer_language_pair(str(data))
        if cfg.task.source_lang is None:
            raise SynthesizerError(f"--data {data}: no pair of languages; the checkpoint is of a {cfg.task._name} task")
    try:
        return tasks.setup_task(cfg.task)
    except FileNotFoundError as error:
        raise SynthesizerError(
            f"--data {data}: {error.filename or error} is missing; give the data that the model was trained on"
        ) from error


def dictionary_size(task: Any, key: str) -> int:
    """The size of the dictionary of an embedding, by its name in the state dict."""
    dictionary = task.source_dictionary if key.startswith("encoder") else task.target_dictionary
    return len(dictionary if dictionary is not None else task.source_dictionary)


def make_dictionaries(folder: Path, cfg: Any, sizes: dict[str, int]) -> None:
    """Dictionaries of made-up words under the names that fairseq's tasks read."""
    largest = max(sizes.values())
    files = {"dict.txt": largest, "input0/dict.txt": largest, "label/dict.txt": getattr(cfg, "num_classes", 0) + 4}
    for side, language in (("encoder", "source_lang"), ("decoder", "target_lang")):
        if getattr(cfg, language, None):
            files[f"dict.{getattr(cfg, language)}.txt"] = sizes.get(f"{side}.embed_tokens", largest)
    for name, size in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        lines = (f"word{i} 1\n" for i in range(size - 4))  # beside four special symbols
        (folder / name).write_text("".join(lines), encoding="utf-8")


def readable(loaded: Loaded, subset: str, sentences: int | None = None, longest: int | None = None) -> list[int]:
    """The first sentences of a subset, shortest first, without those that the model cannot take.

    Args:
        loaded: with data.
        subset: its split, which is loaded.
        sentences: how many; None for all.
        longest: tokens of a sentence at most; None for what the model can take.

    Raises:
        SynthesizerError: there is no such subset, or it has no sentence that the model can take.
    """
    folder = loaded.data
    try:
        loaded.task.load_dataset(subset)
    except FileNotFoundError as error:
        raise SynthesizerError(f"--data {folder}: has no split {subset!r}, which is to be read") from error
    dataset = loaded.task.dataset(subset)
    dataset.set_epoch(1)  # masks of a masked language model depend on the epoch; fairseq-validate reads the first
    indices = np.arange(min(len(dataset), sentences or len(dataset)))
    limits = utils.resolve_max_positions(loaded.task.max_positions(), loaded.model.max_positions())
    count, (indices, _) = len(indices), dataset.filter_indices_by_size(indices, limits)
    found = [i for i in indices.tolist() if longest is None or dataset.num_tokens(i) <= longest]
    if len(found) < count:
        logger.warning(f"{loaded.path}: {count - len(found)} sentences of {subset} are longer than the model can take")
    if not found:
        raise SynthesizerError(f"--subset {subset}: no sentence that the model can take (limits: {longest or limits})")
    return sorted(found, key=lambda i: (dataset.num_tokens(i), i))


def batches(loaded: Loaded, subset: str, order: Sequence[int], max_tokens: int = 4096) -> list[Batch]:
    """Sentences in batches of fairseq's.

    Args:
        order: what `readable` returns.
        max_tokens: padded tokens of a batch at most.
    """
    dataset = loaded.task.dataset(subset)
    groups = dataset.batch_by_size(np.array(order), max_tokens=max_tokens, required_batch_size_multiple=1)
    return [dataset.collater([dataset[i] for i in group]) for group in groups if len(group)]
