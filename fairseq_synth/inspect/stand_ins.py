"""Sets up the task of a checkpoint on its data, or without data on dictionaries of made-up words."""

import re
import tempfile
from pathlib import Path
from typing import Any

from fairseq import tasks
from fairseq.data.data_utils import infer_language_pair
from torch import Tensor

from ..errors import SynthesizerError

NUM_SPECIAL_SYMBOLS = 4  # that every dictionary of fairseq has before its words


def count_embeddings(weights: dict[str, Tensor]) -> dict[str, int]:
    """Returns {name of an embedding of tokens: its number of entries}; adaptive inputs have several tables."""
    sizes: dict[str, int] = {}
    for key, value in weights.items():
        match = re.fullmatch(r"(.*embed_tokens)\.(?:weight|embeddings\.\d+\.0\.weight)", key)
        if match:
            name = match[1]
            sizes[name] = sizes.get(name, 0) + len(value)
    return sizes


def count_words(task: Any, embedding: str) -> int:
    """Returns the size of the dictionary that an embedding belongs to."""
    dictionary = task.source_dictionary if embedding.startswith("encoder") else task.target_dictionary
    if dictionary is None:  # a task of a single text
        dictionary = task.source_dictionary
    return len(dictionary)


def set_up_task(cfg: Any, data: Path) -> Any:
    """Returns the checkpoint's task on the dictionaries of a folder; sets the folder in the task's config.

    Raises:
        SynthesizerError: the folder or its dictionaries are missing, or have no pair of languages.
    """
    if not data.is_dir():
        raise SynthesizerError(f"--data {data}: no such folder; give the one of fairseq-preprocess")
    cfg.task.data = str(data)
    has_languages = hasattr(cfg.task, "source_lang")
    if has_languages and not (cfg.task.source_lang and cfg.task.target_lang):
        cfg.task.source_lang, cfg.task.target_lang = infer_language_pair(str(data))
        if cfg.task.source_lang is None:
            raise SynthesizerError(f"--data {data}: no pair of languages; the checkpoint is of a {cfg.task._name} task")
    try:
        return tasks.setup_task(cfg.task)
    except FileNotFoundError as error:
        raise SynthesizerError(
            f"--data {data}: {error.filename or error} is missing; give the data that the model was trained on"
        ) from error


def set_up_task_on_stand_ins(cfg: Any, sizes: dict[str, int]) -> Any:
    """Returns the checkpoint's task on dictionaries of made-up words, as large as its embeddings.

    Args:
        cfg: the checkpoint's config, whose data and languages are set.
        sizes: what `count_embeddings` returns.
    """
    if hasattr(cfg.task, "source_lang") and cfg.task.source_lang is None:
        cfg.task.source_lang = "source"
        cfg.task.target_lang = "target"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dictionaries(folder, cfg.task, sizes)
        task = set_up_task(cfg, folder)
        smaller_sizes = {}
        for embedding, size in sizes.items():
            num_added = count_words(task, embedding) - size  # some tasks add a symbol of their own
            smaller_sizes[embedding] = size - num_added
        if smaller_sizes != sizes:
            write_dictionaries(folder, cfg.task, smaller_sizes)
            task = set_up_task(cfg, folder)
    return task


def write_dictionaries(folder: Path, task_cfg: Any, sizes: dict[str, int]) -> None:
    """Writes dictionaries of made-up words under the names that fairseq's tasks read."""
    largest = max(sizes.values())
    num_labels = getattr(task_cfg, "num_classes", 0)
    files = {
        "dict.txt": largest,
        "input0/dict.txt": largest,
        "label/dict.txt": num_labels + NUM_SPECIAL_SYMBOLS,
    }
    for stack, option in (("encoder", "source_lang"), ("decoder", "target_lang")):
        language = getattr(task_cfg, option, None)
        if language:
            files[f"dict.{language}.txt"] = sizes.get(f"{stack}.embed_tokens", largest)
    for name, size in files.items():
        lines = [f"word{i} 1\n" for i in range(size - NUM_SPECIAL_SYMBOLS)]
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
