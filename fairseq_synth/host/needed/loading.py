"""Loads checkpoints with torch's safe loader, and tells it which harmless types a checkpoint of fairseq may hold."""

import argparse
import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import fairseq.distributed.utils
import numpy as np
import omegaconf
import torch

from ..repairs import custom_repair, repair


def has_allow_list() -> bool:
    """Returns whether this torch has a list of types that its safe loader allows (torch >= 2.6)."""
    return hasattr(torch.serialization, "safe_globals")


def load_weights_only(original_load_checkpoint_to_cpu: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``load_checkpoint_to_cpu`` with one that loads every checkpoint with ``weights_only=True``.

    fairseq's main branch and fairseq-fixed pass False, which runs the code that a pickle contains. Versions of torch
    before 2.6 have no list of allowed types; with them nothing changes. This replacement is no repair that could be
    switched off.
    """
    with weights_only():
        return original_load_checkpoint_to_cpu(*args, **kwargs)


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Makes torch.load safe in the body of a with statement, whatever its caller asks for."""
    original_load = torch.load

    def safe_load(*args: Any, **kwargs: Any) -> Any:
        kwargs["weights_only"] = True
        return original_load(*args, **kwargs)

    if has_allow_list():
        torch.load = safe_load
    try:
        yield
    finally:
        torch.load = original_load


@custom_repair(
    symptom="torch >= 2.6 refuses to load the checkpoints of stock models and of `--eval-bleu`",
    versions="all versions",
)
def allow_checkpoint_types() -> bool:
    """Allows torch's safe loader to load types of fairseq's checkpoints that only hold values.

    These are the Namespace in the checkpoint of a stock model, and the numpy arrays that ``--eval-bleu`` logs. Without
    the repair, loading ends in an UnpicklingError about ``weights_only=True``.
    """
    if not has_allow_list() or argparse.Namespace in torch.serialization.get_safe_globals():
        return False
    torch.serialization.add_safe_globals([argparse.Namespace, *numpy_types()])
    return True


def numpy_types() -> list[Any]:
    """Returns the types and functions of which a pickled numpy array or number consists."""
    types: list[Any] = [np.ndarray, np.dtype, type(np.dtype("int64")), type(np.dtype("float64"))]
    make_array: Any = np.zeros(1).__reduce__()[0]
    make_number: Any = np.float64(0).__reduce__()[0]
    for function in (make_array, make_number):
        types.append(function)
        # A pickle has the function's module, whose name depends on the numpy that wrote the file.
        types.append((function, f"numpy.core.multiarray.{function.__name__}"))
        types.append((function, f"numpy._core.multiarray.{function.__name__}"))
    return types


def config_types() -> list[Any]:
    """Returns the types of which a config of fairseq consists and that torch's safe loader does not know."""
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


@repair(
    "broadcast_object",
    fairseq.distributed.utils,
    symptom="Several processes cannot resume with torch >= 2.6: they end in an UnpicklingError",
    versions="all versions",
    where=has_allow_list,
)
def allow_config_in_broadcast(original_broadcast_object: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces fairseq's ``broadcast_object`` with one that may unpickle the types of a config.

    When a training of several processes is resumed, the first process broadcasts the checkpoint with its config. The
    types of the config are allowed only for the broadcast, never for a file.
    """
    with torch.serialization.safe_globals(config_types()):
        return original_broadcast_object(*args, **kwargs)
