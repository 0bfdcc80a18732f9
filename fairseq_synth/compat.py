"""What the plugin asks of its host, and repairs of fairseq where it needs them.

Each repair names the versions and the symptom, and is applied only where the symptom is present.
"""

import argparse
import collections
import contextlib
import importlib.util
import logging
import os
import pickle
import platform
import shutil
import signal
import sys
from types import SimpleNamespace
from typing import Any, Iterator, List, Type

import numpy as np
import torch
import torch.nn as nn

from .errors import SynthesizerError, first_line, print_explanations

logger = logging.getLogger(__name__)

SUPPORTED = (
    "supported: Python 3.8 to 3.10 with fairseq 0.12.2 and torch 2.3, Python 3.11 and 3.12 with ve-fairseq 0.12.3 "
    "and torch 2.6 to 2.13"
)


def check_torch(version: str) -> None:
    """Refuses a torch older than the tested ones; warns of a newer one.

    Raises:
        SynthesizerError: names the supported versions.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 3):
        raise SynthesizerError(f"torch {version} is too old; {SUPPORTED}")
    if (major, minor) > (2, 13):
        logger.warning(f"torch {version} is newer than the tested ones; {SUPPORTED}")


def import_host() -> None:
    """Imports fairseq's Transformer.

    Raises:
        SynthesizerError: this fairseq has none that fits, or does not import on this Python.
    """
    try:
        from fairseq.models.transformer import TransformerEncoderBase  # noqa: F401
    except Exception as error:  # 0.12.2 on Python 3.11 fails with a ValueError from dataclasses
        reason = first_line(error)
        raise SynthesizerError(
            f"this fairseq cannot be used with Python {platform.python_version()} ({reason}); {SUPPORTED}"
        ) from error


print_explanations()
check_torch(torch.__version__)
import_host()

import fairseq.checkpoint_utils  # noqa: E402
import fairseq.data.data_utils  # noqa: E402
import fairseq.distributed.utils  # noqa: E402
import fairseq.modules.transformer_layer  # noqa: E402
import fairseq.options  # noqa: E402
import omegaconf  # noqa: E402
from fairseq.distributed import DistributedTimeoutWrapper  # noqa: E402
from fairseq.file_io import PathManager  # noqa: E402
from fairseq.tasks import FairseqTask  # noqa: E402


def restore_numpy_compat() -> None:
    """numpy >= 2 has no ``np.compat``; fairseq calls ``np.compat.long`` (AttributeError)."""
    if not hasattr(np, "compat"):
        np.compat = SimpleNamespace(long=int)


def allow_bf16_without_tpu() -> None:
    """``--bf16`` makes the command line ask for a TPU ('NoneType' object has no attribute 'xla_device').

    fairseq 0.12.2 and later; Hydra's ``common.bf16=true`` does not. Without torch_xla there is no TPU to mean.
    """
    if importlib.util.find_spec("torch_xla") is not None:
        return
    parse_args_and_arch = fairseq.options.parse_args_and_arch

    def parse_args_and_arch_without_tpu(*args: Any, **kwargs: Any) -> Any:
        parsed = parse_args_and_arch(*args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        if getattr(namespace, "bf16", False):
            namespace.tpu = False
        return parsed

    fairseq.options.parse_args_and_arch = parse_args_and_arch_without_tpu


def keep_last_batch() -> None:
    """fairseq after 0.12.2 drops the last n mod 8 sentences of every data set (its issue #5036).

    ``batch_by_size`` returns consecutive batches less a last one whose size is no multiple of
    ``--required-batch-size-multiple``: 100 test sentences give 96 translations. 0.12.2 keeps it.
    """
    batch_by_size = fairseq.data.data_utils.batch_by_size
    three = np.arange(3)
    if batch_by_size(three, None, num_tokens_vec=three, max_sentences=8, required_batch_size_multiple=8):
        return

    def batch_by_size_keeping_all(indices: Any, *args: Any, **kwargs: Any) -> List[np.ndarray]:
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        if len(indices) == 0:
            return []
        batches = list(batch_by_size(indices, *args, **kwargs))
        fixed_shapes = kwargs.get("fixed_shapes") or (args[5] if len(args) > 5 else None)
        kept = sum(len(batch) for batch in batches)
        if fixed_shapes is None and kept < len(indices):
            batches.append(indices[kept:])
        return batches

    fairseq.data.data_utils.batch_by_size = batch_by_size_keeping_all


def resume_with_the_same_batches() -> None:
    """A run resumed after its first epoch groups its sentences into other batches than the run it continues.

    All versions: batches are formed once, from ``--seed`` plus the epoch that the process starts in, and reused
    in every epoch after it. Here that is the first epoch always; their order still changes with the epoch.
    """
    get_batch_iterator = FairseqTask.get_batch_iterator

    def get_batch_iterator_of_first_epoch(self: FairseqTask, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        epoch = kwargs.get("epoch", 1)
        made_once = self.can_reuse_epoch_itr(dataset) and not kwargs.get("update_epoch_batch_itr")
        if epoch == 1 or not made_once or dataset in self.dataset_to_epoch_iter:
            return get_batch_iterator(self, dataset, *args, **kwargs)
        iterator = get_batch_iterator(self, dataset, *args, **{**kwargs, "epoch": 1})
        iterator.epoch = epoch
        return iterator

    FairseqTask.get_batch_iterator = get_batch_iterator_of_first_epoch


def end_without_progress() -> None:
    """All versions: ``--heartbeat-timeout`` only interrupts, which a process that waits for a lost peer never sees.

    Python handles SIGINT between its own instructions, and the wait is one call of gloo or NCCL. SIGTERM ends it.
    """
    DistributedTimeoutWrapper.__init__.__defaults__ = (signal.SIGTERM,)


def stop_where_it_ended() -> None:
    """A run that has reached ``--max-update`` trains one update more each time it is called again (all versions).

    fairseq looks at the number of updates only after a step, and overwrites checkpoint_last.pt then.
    """
    command = sys.modules.get("fairseq_cli.train")  # of fairseq-train and of fairseq-hydra-train
    if command is None:
        return
    train = command.train

    def train_unless_done(cfg: Any, trainer: Any, task: Any, epoch_itr: Any) -> Any:
        updates, most = trainer.get_num_updates(), cfg.optimization.max_update
        if most and updates >= most:
            logger.info(f"nothing to do: {updates} updates are trained, --max-update is {most}")
            return [None], True
        return train(cfg, trainer, task, epoch_itr)

    command.train = train_unless_done


def allow_checkpoint_types() -> None:
    """torch >= 2.6 loads with ``weights_only=True``, which refuses fairseq's checkpoints (UnpicklingError).

    Allowed are plain containers of values: the Namespace of a stock model's checkpoint and the numpy arrays
    that ``--eval-bleu`` logs. Only while a resume broadcasts the checkpoint from the first process to the
    others, the config's own types as well.
    """
    if not hasattr(torch.serialization, "safe_globals"):
        return
    array_parts: List[Any] = [np.ndarray, np.dtype, np.dtypes.Int64DType, np.dtypes.Float64DType]
    for reconstruct in (np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]):
        array_parts.append(reconstruct)
        # a checkpoint names the module by its place in the numpy that wrote it
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            array_parts.append((reconstruct, f"{module}.{reconstruct.__name__}"))
    torch.serialization.add_safe_globals([argparse.Namespace, *array_parts])

    config_parts = [
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
    broadcast_object = fairseq.distributed.utils.broadcast_object

    def broadcast_object_allowing_config(*args: Any, **kwargs: Any) -> Any:
        with torch.serialization.safe_globals(config_parts):
            return broadcast_object(*args, **kwargs)

    fairseq.distributed.utils.broadcast_object = broadcast_object_allowing_config


def load_checkpoints_safely() -> None:
    """A damaged or refused checkpoint gives a C++ or pickle error without its name (all versions).

    fairseq's main branch and fairseq-fixed also load with ``weights_only=False``, which runs what a pickle
    says; here every checkpoint is loaded with True from torch 2.6 on.
    """
    load = fairseq.checkpoint_utils.load_checkpoint_to_cpu

    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            with weights_only():
                return load(path, *args, **kwargs)
        except (FileNotFoundError, PermissionError):
            raise
        except pickle.UnpicklingError as error:
            raise SynthesizerError(
                f"{path}: refused, it is damaged or holds more than weights and settings and might run code "
                f"({first_line(error, 'Unsupported')}); take a checkpoint that you trust"
            ) from error
        except Exception as error:  # a damaged file can fail anywhere in the loader
            raise SynthesizerError(
                f"{path}: not a readable checkpoint, perhaps cut short ({first_line(error)}); take an earlier one, "
                "for example with --restore-file"
            ) from error

    fairseq.checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


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


def write_checkpoints_whole() -> None:
    """fairseq copies a new checkpoint *onto* checkpoint_last.pt and checkpoint_best.pt (all versions).

    A kill or a full disk in the middle leaves them cut short, and the old ones gone. Here a copy gets its
    name once it is whole, and a save that fails takes its ``.tmp`` with it.
    """
    copy, save = PathManager.copy, fairseq.checkpoint_utils.torch_persistent_save

    def copy_whole(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not PathManager.supports_rename(dst_path):
            return copy(src_path, dst_path, overwrite=overwrite)
        with removed_on_error(dst_path + ".tmp"):
            shutil.copyfile(src_path, dst_path + ".tmp")  # raises; iopath's own only returns False
            os.replace(dst_path + ".tmp", dst_path)
        return True

    def save_whole(obj: Any, filename: str, async_write: bool = False) -> Any:
        with removed_on_error(f"{filename}.tmp"):
            return save(obj, filename, async_write=async_write)

    PathManager.copy = staticmethod(copy_whole)
    fairseq.checkpoint_utils.torch_persistent_save = save_whole


@contextlib.contextmanager
def removed_on_error(path: str) -> Iterator[None]:
    """Removes the file `path`, if it exists, when the body fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        raise


# of weights, in every encoder layer of fairseq 0.12.2 and of its checkpoints
FAST_PATH_COPIES = [f"{name}_{part}" for name in ("in_proj", "out_proj", "fc1", "fc2") for part in ("weight", "bias")]


def without_fast_path(layer_class: Type[nn.Module]) -> Type[nn.Module]:
    """fairseq 0.12.2's encoder layer computes its own dot-product attention at inference (BetterTransformer).

    It bypasses the layer's ``self_attn`` once a checkpoint is loaded, keeps eight dead copies of the weights
    for that, and cannot be built around an attention without q_proj. This is the same layer without it.
    """
    if "_load_from_state_dict" not in vars(layer_class):
        return layer_class

    class TransformerEncoderLayerWithoutFastPath(layer_class):  # type: ignore[misc, valid-type]
        def __init__(self, cfg: Any, return_fc: bool = False) -> None:
            build_self_attention = self.build_self_attention
            # what the host's copies are shaped after
            size = {"weight": torch.empty(0, 0), "bias": torch.empty(0)}
            stand_in = SimpleNamespace(q_proj=SimpleNamespace(**size), out_proj=SimpleNamespace(**size))
            object.__setattr__(self, "build_self_attention", lambda embed_dim, cfg: stand_in)
            super().__init__(cfg, return_fc=return_fc)
            for name in FAST_PATH_COPIES:
                delattr(self, name)
                setattr(self, name, torch.empty(0))  # no parameter; TorchScript looks for the name
            del self.build_self_attention, self.self_attn
            self.self_attn = build_self_attention(self.embed_dim, cfg)
            self.can_use_fastpath = False

    return TransformerEncoderLayerWithoutFastPath


TransformerEncoderLayerBase = without_fast_path(fairseq.modules.transformer_layer.TransformerEncoderLayerBase)

restore_numpy_compat()
allow_bf16_without_tpu()
keep_last_batch()
resume_with_the_same_batches()
end_without_progress()
stop_where_it_ended()
allow_checkpoint_types()
load_checkpoints_safely()
write_checkpoints_whole()
