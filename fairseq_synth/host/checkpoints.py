"""Repairs of how fairseq reads and writes checkpoints, and what it may read."""

import argparse
import collections
import contextlib
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fairseq.checkpoint_utils
import fairseq.distributed.utils
import numpy as np
import omegaconf
import torch
from fairseq.file_io import PathManager

from ..errors import UNUSABLE_PATH, SynthesizerError, first_line, raised_in
from .repairs import listed, repair


def load_weights_only(load_checkpoint_to_cpu: Any, *args: Any, **kwargs: Any) -> Any:
    """Every checkpoint is loaded with ``weights_only=True``, where torch has it with a list of allowed types (>= 2.6).

    fairseq's main branch and fairseq-fixed say False, which runs what a pickle says. Not a repair to be switched off.
    """
    with weights_only():
        return load_checkpoint_to_cpu(*args, **kwargs)


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """torch.load with ``weights_only=True``, whatever the caller says, where torch has an allow-list."""
    load = torch.load

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "weights_only": True})

    if hasattr(torch.serialization, "safe_globals"):
        torch.load = load_weights
    try:
        yield
    finally:
        torch.load = load


@listed
def allow_checkpoint_types() -> bool:
    """torch >= 2.6 refuses to load the checkpoints of stock models and of ``--eval-bleu`` (all versions).

    The symptom is an UnpicklingError of ``weights_only=True``. Here plain containers of values are
    allowed: the Namespace of a stock model's checkpoint and the numpy arrays that ``--eval-bleu`` logs.
    """
    safe = torch.serialization
    if not hasattr(safe, "safe_globals") or argparse.Namespace in safe.get_safe_globals():
        return False
    array_parts: list[Any] = [np.ndarray, np.dtype, type(np.dtype("int64")), type(np.dtype("float64"))]
    reconstructs: list[Any] = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
    for reconstruct in reconstructs:
        array_parts.append(reconstruct)
        # a checkpoint names the module by its place in the numpy that wrote it
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            array_parts.append((reconstruct, f"{module}.{reconstruct.__name__}"))
    safe.add_safe_globals([argparse.Namespace, *array_parts])
    return True


def config_types() -> list[Any]:
    """What a config consists of that is no plain value."""
    return [
        omegaconf.DictConfig,
        omegaconf.ListConfig,
        omegaconf.base.ContainerMetadata,
        omegaconf.base.Metadata,
        omegaconf.nodes.AnyNode,
        Any,
        dict,
        list,
        int,
        collections.defaultdict,
        fairseq.distributed.utils._TensorPlaceholder,
    ]


@repair("broadcast_object", fairseq.distributed.utils, where=lambda: hasattr(torch.serialization, "safe_globals"))
def allow_config_in_broadcast(broadcast_object: Any, *args: Any, **kwargs: Any) -> Any:
    """Several processes cannot resume with torch >= 2.6: they end in an UnpicklingError (all versions).

    The first process broadcasts the checkpoint with its config. The config's types are allowed for that alone,
    never for a file.
    """
    with torch.serialization.safe_globals(config_types()):
        return broadcast_object(*args, **kwargs)


@repair("load_checkpoint_to_cpu", fairseq.checkpoint_utils)
def name_unreadable_checkpoints(load_checkpoint_to_cpu: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint that cannot be loaded gives a C++ or pickle error without its name (all versions)."""
    try:
        return load_checkpoint_to_cpu(path, *args, **kwargs)
    except UNUSABLE_PATH:  # they name it
        raise
    except Exception as error:  # a damaged file can fail anywhere in the loader
        raise SynthesizerError(f"{path}: {why_unreadable(error)}") from error


def why_unreadable(error: Exception) -> str:
    """What is wrong with a checkpoint whose loading ended in `error`, and what to do, in one line."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "not enough memory to load it; end other programs, or take a machine with more"
    if isinstance(error, ImportError):
        return f"refers to a module that is not installed ({first_line(error)}); install it"
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return (
            f"refused, it holds {refused[1]}, which is neither a weight nor a setting and might run code; "
            "take a checkpoint that you trust"
        )
    if isinstance(error, pickle.UnpicklingError):
        return (
            f"refused, it is damaged or no checkpoint of torch ({first_line(error, 'Unsupported')}); "
            "take one that you trust"
        )
    if raised_in(error, "torch"):
        return (
            f"not a readable checkpoint, perhaps cut short ({type(error).__name__}: {first_line(error)}); take another"
        )
    return (
        f"not a checkpoint of fairseq-train ({type(error).__name__}: {first_line(error)}); give one that it has "
        "written, such as checkpoint_best.pt"
    )


@repair("copy", PathManager)
def write_checkpoints_atomically(copy: Any, src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """fairseq copies a new checkpoint *onto* checkpoint_last.pt and checkpoint_best.pt (all versions).

    A kill or a full disk in the middle leaves them cut short, and the old ones gone. Here a file that would be
    overwritten is replaced once its copy is complete.
    """
    if not overwrite or not PathManager.supports_rename(dst_path):
        return copy(src_path, dst_path, overwrite=overwrite)
    with removed_on_error(dst_path + ".tmp"):
        shutil.copyfile(src_path, dst_path + ".tmp")  # raises; iopath's own only returns False
        os.replace(dst_path + ".tmp", dst_path)
    return True


@repair("torch_persistent_save", fairseq.checkpoint_utils)
def remove_unfinished_checkpoints(torch_persistent_save: Any, obj: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint that cannot be written, as on a full disk, leaves a ``.tmp`` file behind (all versions)."""
    with removed_on_error(f"{path}.tmp"):
        return torch_persistent_save(obj, path, *args, **kwargs)


@contextlib.contextmanager
def removed_on_error(path: str) -> Iterator[None]:
    """Removes the file `path`, if it exists, when the body fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # none was written, or, on a read-only disk, none can be removed
            os.remove(path)
        raise


@repair("save_checkpoint", fairseq.checkpoint_utils)
def number_checkpoints_at_epoch_ends(
    save_checkpoint: Any, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any
) -> Any:
    """With ``--no-epoch-checkpoints``, a save at the end of an epoch writes no numbered checkpoint (all versions).

    Its state is in checkpoint_last.pt alone, so the average of the last checkpoints lacks it. Where an epoch has few
    batches, every save of ``--save-interval-updates`` may be one of these.
    """
    if cfg.no_epoch_checkpoints:
        state = {"epoch": epoch_itr.epoch, "state_dict": epoch_itr.state_dict}
        epoch_itr = SimpleNamespace(**state, end_of_epoch=lambda: False)
    return save_checkpoint(cfg, trainer, epoch_itr, val_loss)
