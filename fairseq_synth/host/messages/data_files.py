"""Names the file of binarised data that is cut short."""

import os
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

import fairseq.data.indexed_dataset
import numpy as np
from fairseq.data.indexed_dataset import (
    IndexedDataset,
    MMapIndexedDataset,
    _code_to_dtype,
    data_file_path,
    index_file_path,
)

from ...errors import SynthesizerError
from ..repairs import repair

# An index starts with bytes that name its format. These are the two formats of fairseq.
MMAP_MAGIC: bytes = MMapIndexedDataset.Index._HDR_MAGIC  # 9 bytes
INDEXED_MAGIC: bytes = IndexedDataset._HDR_MAGIC  # 8 bytes


@repair(
    "make_dataset",
    fairseq.data.indexed_dataset,
    symptom="A truncated `.bin` or `.idx` file gives an error without the file's name, or is read as random numbers",
    versions="all versions",
)
def name_cut_data_files(original: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.data.indexed_dataset.make_dataset`` (``original``): refuses data files that are cut short.

    Without the replacement, numpy's error comes only during the training and does not name the file. With
    ``--dataset-impl cached`` or ``lazy`` there is no error, and the sentences are random numbers.

    Args:
        original: fairseq's function.
        path: the path of the data without ``.bin`` and ``.idx``.
        args, kwargs: the other arguments of fairseq's function.

    Raises:
        SynthesizerError: one of the two files is cut short.
    """
    if IndexedDataset.exists(path):
        check_data_files(path)
    return original(path, *args, **kwargs)


def check_data_files(path: str) -> None:
    """Checks that the data file PATH.bin is as long as the index PATH.idx says; raises SynthesizerError otherwise."""
    index_file = index_file_path(path)
    data_file = data_file_path(path)
    try:
        expected_size = read_data_size(index_file)
    except (struct.error, ValueError) as error:
        raise SynthesizerError(explain_cut_file(index_file)) from error
    if expected_size is not None and os.path.getsize(data_file) < expected_size:
        raise SynthesizerError(explain_cut_file(data_file))


def explain_cut_file(path: str) -> str:
    """Returns the line about a file of data that is cut short."""
    return (
        f"{path}: is cut short, perhaps by a full disk or an interrupted copy; remove this folder and run "
        "fairseq-preprocess (or scripts/prepare.sh) again, or copy it again"
    )


def read_data_size(index_file: str) -> int | None:
    """Returns the size in bytes that a data file must have according to its index, or None for an unknown format.

    Raises struct.error or ValueError if the index is cut short.
    """
    with open(index_file, "rb") as file:
        if starts_with(file, MMAP_MAGIC):
            return read_mmap_size(file)
        if starts_with(file, INDEXED_MAGIC):
            return read_indexed_size(file)
    if os.path.getsize(index_file) < len(MMAP_MAGIC):
        raise ValueError("the index is too short for any of the formats")
    return None


def starts_with(file: BinaryIO, magic: bytes) -> bool:
    """Reads the first bytes of a file, and returns whether they are `magic`. The next read begins after them."""
    file.seek(0)  # An earlier call may have read from the file.
    return file.read(len(magic)) == magic


def read_mmap_size(file: BinaryIO) -> int:
    """Returns the size in bytes that an index in the format of `MMapIndexedDataset` gives its data file.

    After the magic bytes, the index has a header of three numbers, and then two arrays: the number of tokens in each
    sentence, and the position of each sentence in the data file, in bytes.

    Args:
        file: the index, from which the magic bytes have been read.
    """
    # In the notation of the module struct, Q is a number of 8 bytes, and B is one of 1 byte.
    _version, dtype_code, num_sentences = read_header(file, "<QBQ")
    sentence_lengths = read_numbers(file, num_sentences, np.int32)
    sentence_positions = read_numbers(file, num_sentences, np.int64)
    if num_sentences == 0:
        return 0
    # The data end with the last sentence.
    bytes_per_token = np.dtype(_code_to_dtype[dtype_code]).itemsize
    return int(sentence_positions[-1]) + int(sentence_lengths[-1]) * bytes_per_token


def read_indexed_size(file: BinaryIO) -> int:
    """Returns the size in bytes that an index in the format of `IndexedDataset` gives its data file.

    The index has a header of five numbers, and then three arrays. For example, for sentences of 3 and 2 tokens:

        [0, 1, 2]    where the shape of each sentence begins in the last array, and where it ends
        [0, 3, 5]    where each sentence begins in the data file, in tokens, and the number of all tokens
        [3, 2]       the shapes of all sentences

    Args:
        file: the index, from which the magic bytes have been read.
    """
    # In the notation of the module struct, Q is a number of 8 bytes.
    _version, _dtype_code, bytes_per_token, num_sentences, num_shapes = read_header(file, "<QQQQQ")
    # All arrays have to be read, one after the other. This raises ValueError if the index is cut short.
    _shape_positions = read_numbers(file, num_sentences + 1, np.int64)  # [0, 1, 2]
    sentence_positions = read_numbers(file, num_sentences + 1, np.int64)  # [0, 3, 5]
    _shapes = read_numbers(file, num_shapes, np.int64)  # [3, 2]
    num_tokens = int(sentence_positions[-1])  # 5
    return num_tokens * bytes_per_token


def read_header(file: BinaryIO, layout: str) -> tuple[int, ...]:
    """Returns the next numbers of a binary file; raises struct.error if the file ends before them.

    Args:
        file: the file.
        layout: how the numbers are stored, in the notation of the module struct.
    """
    content = file.read(struct.calcsize(layout))
    return struct.unpack(layout, content)


def read_numbers(file: BinaryIO, count: int, dtype: Any) -> np.ndarray:
    """Returns the next `count` numbers of a binary file; raises ValueError if it has fewer."""
    content = file.read(count * np.dtype(dtype).itemsize)
    return np.frombuffer(content, dtype=dtype, count=count)
