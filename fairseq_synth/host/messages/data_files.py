"""Names the file of binarised data that is cut short."""

import os
import struct
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


@repair(
    "make_dataset",
    fairseq.data.indexed_dataset,
    symptom="A `.bin` or `.idx` file that is cut short is not named, or is read as random numbers",
    versions="all versions",
)
def name_cut_data_files(original_make_dataset: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces fairseq's ``make_dataset`` with one that names a ``.bin`` or ``.idx`` file that is cut short.

    Without the repair, numpy's error comes only after the training has begun, and data of ``--dataset-impl cached`` and
    ``lazy`` are read as random numbers.
    """
    if IndexedDataset.exists(path):
        check_data_files(path)
    return original_make_dataset(path, *args, **kwargs)


def check_data_files(path: str) -> None:
    """Checks that an index and its data are as long as the index says; raises SynthesizerError otherwise.

    Args:
        path: the path of both files, without ``.idx`` and ``.bin``.
    """
    index_file = index_file_path(path)
    data_file = data_file_path(path)
    try:
        data_size = read_data_size(index_file)
    except (struct.error, ValueError) as error:
        raise SynthesizerError(explain_cut_file(index_file)) from error
    if data_size is not None and os.path.getsize(data_file) < data_size:
        raise SynthesizerError(explain_cut_file(data_file))


def explain_cut_file(path: str) -> str:
    """Returns the line about a file of data that is cut short."""
    return (
        f"{path}: is cut short, perhaps by a full disk or an interrupted copy; remove this folder and run "
        "fairseq-preprocess (or scripts/prepare.sh) again, or copy it again"
    )


def read_data_size(index_file: str) -> int | None:
    """Returns the size in bytes that an index gives its data file, or None for an unknown format.

    Raises struct.error or ValueError if the index is cut short.
    """
    with open(index_file, "rb") as file:
        start = file.read(len(MMapIndexedDataset.Index._HDR_MAGIC))
        if start == MMapIndexedDataset.Index._HDR_MAGIC:
            return read_mmap_size(file)
        if start.startswith(IndexedDataset._HDR_MAGIC):
            file.seek(len(IndexedDataset._HDR_MAGIC))
            return read_indexed_size(file)
        if len(start) < len(MMapIndexedDataset.Index._HDR_MAGIC):
            raise ValueError("an index without a header")
    return None


def read_mmap_size(file: BinaryIO) -> int:
    """Returns the size of the data of an index of `MMapIndexedDataset`, read from the position behind its magic."""
    _version, dtype_code, length = struct.unpack("<QBQ", file.read(17))
    sizes = read_numbers(file, length, np.int32)
    pointers = read_numbers(file, length, np.int64)
    if length == 0:
        return 0
    item_size = np.dtype(_code_to_dtype[dtype_code]).itemsize
    return int(pointers[-1]) + int(sizes[-1]) * item_size


def read_indexed_size(file: BinaryIO) -> int:
    """Returns the size of the data of an index of `IndexedDataset`, read from the position behind its magic."""
    _version, _dtype_code, item_size, length, number_of_sizes = struct.unpack("<QQQQQ", file.read(40))
    read_numbers(file, length + 1, np.int64)  # where the dimensions of each item begin
    data_offsets = read_numbers(file, length + 1, np.int64)
    read_numbers(file, number_of_sizes, np.int64)
    return int(data_offsets[-1]) * item_size


def read_numbers(file: BinaryIO, count: int, dtype: Any) -> np.ndarray:
    """Returns `count` numbers from a file; raises ValueError if it has fewer."""
    content = file.read(count * np.dtype(dtype).itemsize)
    return np.frombuffer(content, dtype=dtype, count=count)
