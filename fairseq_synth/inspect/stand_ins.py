"""Sets up the task of a checkpoint: with the dictionaries of its data, or without data with made-up dictionaries."""

import re
import tempfile
from pathlib import Path
from typing import Any

from fairseq import tasks
from fairseq.data.data_utils import infer_language_pair
from torch import Tensor

from ..errors import SynthesizerError

# The name of an embedding's weight: encoder.embed_tokens.weight, for example; or, of one of the tables of adaptive
# inputs, decoder.embed_tokens.embeddings.0.0.weight.
EMBEDDING_WEIGHT = re.compile(r"(?P<embedding>.*embed_tokens)\.(weight|embeddings\.\d+\.0\.weight)")
NUM_SPECIAL_SYMBOLS = 4  # <s>, <pad>, </s> and <unk>, which every dictionary of fairseq has before its words


def count_embeddings(weights: dict[str, Tensor]) -> dict[str, int]:
    """Returns the number of tokens that each embedding of a model has.

    Args:
        weights: the model's state dict.

    Returns:
        {name, such as ``encoder.embed_tokens``: number of tokens}. Adaptive inputs divide the tokens among several
        tables, which are counted together.
    """
    sizes: dict[str, int] = {}
    for weight_name, weight in weights.items():
        match = EMBEDDING_WEIGHT.fullmatch(weight_name)
        if match:
            embedding = match["embedding"]
            sizes[embedding] = sizes.get(embedding, 0) + len(weight)  # a row of the weight for each token
    return sizes


def count_words(task: Any, embedding: str) -> int:
    """Returns the number of entries of the dictionary that belongs to an embedding.

    An embedding of the encoder belongs to the source dictionary, and any other embedding to the target dictionary. A
    task without targets, such as a language model, has only a source dictionary, which then belongs to all embeddings.

    Args:
        task: a task of fairseq.
        embedding: the name of the embedding, such as ``encoder.embed_tokens``.
    """
    is_in_encoder = embedding.startswith("encoder")
    if is_in_encoder or task.target_dictionary is None:
        return len(task.source_dictionary)
    return len(task.target_dictionary)


def set_up_task(cfg: Any, data: Path) -> Any:
    """Returns the task of a checkpoint with the dictionaries of a folder.

    Args:
        cfg: the checkpoint's config. Its folder of data, and its languages if they are missing, are set here.
        data: the folder.

    Raises:
        SynthesizerError: the folder or a dictionary is missing, or the folder's files name no pair of languages.
    """
    if not data.is_dir():
        raise SynthesizerError(f"--data {data}: no such folder; use the output folder of fairseq-preprocess")
    cfg.task.data = str(data)
    set_missing_languages(cfg.task, data)
    try:
        return tasks.setup_task(cfg.task)
    except FileNotFoundError as error:
        missing = error.filename or error
        raise SynthesizerError(
            f"--data {data}: {missing} is missing; use the data that the model was trained on"
        ) from error


def set_missing_languages(task_cfg: Any, data: Path) -> None:
    """Sets the languages in the config of a task of translation, if they are missing, by the names of the data files.

    Raises:
        SynthesizerError: the folder's files name no pair of languages.
    """
    is_translation = hasattr(task_cfg, "source_lang")  # other tasks have no languages
    if not is_translation:
        return
    if task_cfg.source_lang and task_cfg.target_lang:
        return
    # fairseq's function returns None and None if the names tell no languages.
    task_cfg.source_lang, task_cfg.target_lang = infer_language_pair(str(data))
    if task_cfg.source_lang is None:
        raise SynthesizerError(f"--data {data}: has no pair of languages, which the task {task_cfg._name} needs")


def set_up_task_on_made_up_words(cfg: Any, sizes: dict[str, int]) -> Any:
    """Returns the task of a checkpoint with dictionaries of made-up words.

    Each dictionary gets as many entries as its embedding has tokens. The task reads the dictionaries from files, and
    some tasks then add symbols of their own, such as a mask. For example, if an embedding has 100 tokens, and the task
    adds 1 symbol, the file must have 99 entries. The number of added symbols is known only after the task has been set
    up once. So it may be set up twice.

    Args:
        cfg: the checkpoint's config. Its folder of data, and its languages if they are missing, are set here.
        sizes: {name of an embedding: number of tokens}, as `count_embeddings` returns it.
    """
    make_up_missing_languages(cfg.task)
    task = set_up_task_on_files_of_size(cfg, sizes)  # files of 100 entries, dictionaries of 101
    added = count_added_symbols(task, sizes)  # {"encoder.embed_tokens": 1}
    has_added_symbols = any(number != 0 for number in added.values())
    if has_added_symbols:
        smaller_sizes = {embedding: size - added[embedding] for embedding, size in sizes.items()}
        task = set_up_task_on_files_of_size(cfg, smaller_sizes)  # files of 99 entries, dictionaries of 100
    return task


def make_up_missing_languages(task_cfg: Any) -> None:
    """Changes the config of a task in place: if it lacks the languages of a translation, both get made-up names."""
    is_translation = hasattr(task_cfg, "source_lang")  # other tasks have no languages
    if is_translation and task_cfg.source_lang is None:
        task_cfg.source_lang = "source"
        task_cfg.target_lang = "target"


def set_up_task_on_files_of_size(cfg: Any, sizes: dict[str, int]) -> Any:
    """Returns the task of a checkpoint after it has read dictionaries of made-up words from a temporary folder.

    Args:
        cfg: the checkpoint's config, whose folder of data is set here.
        sizes: {name of an embedding: the size of its dictionary in the file}.
    """
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_dictionaries(folder, cfg.task, sizes)
        return set_up_task(cfg, folder)


def count_added_symbols(task: Any, sizes: dict[str, int]) -> dict[str, int]:
    """Returns how many symbols a task has added to each dictionary after it has read the dictionary from a file.

    The result is {name of an embedding: how many symbols were added to its dictionary}.

    Args:
        task: a task of fairseq.
        sizes: {name of an embedding: the size of its dictionary in the file}.
    """
    return {embedding: count_words(task, embedding) - size for embedding, size in sizes.items()}


def write_dictionaries(folder: Path, task_cfg: Any, sizes: dict[str, int]) -> None:
    """Writes dictionaries of made-up words to a folder, under all names that one of fairseq's tasks may read.

    Args:
        folder: an existing folder.
        task_cfg: the task's config, which names the languages and the number of classes, if it has any.
        sizes: {name of an embedding: the size of its dictionary}.
    """
    for file, size in choose_dictionary_sizes(task_cfg, sizes).items():
        write_dictionary(folder / file, size)


def choose_dictionary_sizes(task_cfg: Any, sizes: dict[str, int]) -> dict[str, int]:
    """Returns the dictionary files that a task may read, as {name of the file: number of entries of the dictionary}.

    For example, a translation from German to English with 1,000 and 2,000 words reads the files in
    {"dict.de.txt": 1000, "dict.en.txt": 2000}. The result also has the files of other tasks, because a file that is not
    read does no harm.

    Args:
        task_cfg: the task's config, which names the languages and the number of classes, if it has any.
        sizes: {name of an embedding: the size of its dictionary}.
    """
    largest_size = max(sizes.values())  # the size of the only embedding, if there is just one
    num_classes = getattr(task_cfg, "num_classes", 0)
    sizes_by_file = {
        "dict.txt": largest_size,  # the words of a language model
        "input0/dict.txt": largest_size,  # the words of a classifier
        "label/dict.txt": num_classes + NUM_SPECIAL_SYMBOLS,  # the labels of a classifier, and fairseq's own symbols
    }
    source_language = getattr(task_cfg, "source_lang", None)  # Only a task of translation has languages.
    target_language = getattr(task_cfg, "target_lang", None)
    if source_language:
        sizes_by_file[f"dict.{source_language}.txt"] = sizes.get("encoder.embed_tokens", largest_size)
    if target_language:
        sizes_by_file[f"dict.{target_language}.txt"] = sizes.get("decoder.embed_tokens", largest_size)
    return sizes_by_file


def write_dictionary(path: Path, size: int) -> None:
    """Writes a dictionary that has `size` entries once fairseq has added its special symbols."""
    num_words = size - NUM_SPECIAL_SYMBOLS
    lines = [f"word{number} 1\n" for number in range(num_words)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
