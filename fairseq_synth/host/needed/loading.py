"""Loads checkpoints with torch's safe loader, and tells it which harmless types a checkpoint of fairseq may hold."""

import argparse
import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import fairseq.distributed.utils
import numpy as np
import omegaconf
import torch

from ..repairs import custom_repair, repair


def torch_can_allow_types() -> bool:
    """Returns whether this torch has a list of types that its safe loader allows (torch >= 2.6)."""
    return hasattr(torch.serialization, "safe_globals")


def load_weights_only(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_checkpoint_to_cpu`` (``original``): never runs code in a checkpoint.

    fairseq's main branch and the fork fairseq-fixed call ``torch.load`` with ``weights_only=False``, which runs the
    code that a pickle contains. With this replacement, the original loads every checkpoint with ``weights_only=True``.
    Nothing changes with versions of torch before 2.6, which have no list of allowed types.

    Unlike the repairs, this replacement cannot be switched off.
    """
    with weights_only():
        return original(*args, **kwargs)


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Is a context manager: in its body, ``torch.load`` loads only weights, and runs no code of the file.

    For this time, ``torch.load`` is replaced by a function that calls it with ``weights_only=True``, whatever its
    caller has passed.

    Nothing changes with versions of torch before 2.6. There, a program cannot allow further types, and without them
    fairseq's checkpoints could not be loaded in this way.
    """
    if not torch_can_allow_types():
        yield
        return
    original_load = torch.load

    def safe_load(*args: Any, **kwargs: Any) -> Any:
        kwargs["weights_only"] = True
        return original_load(*args, **kwargs)

    torch.load = safe_load
    try:
        yield
    finally:
        torch.load = original_load


@custom_repair(
    symptom="torch >= 2.6 cannot load checkpoints of fairseq's own models, or of a training with `--eval-bleu`",
    versions="all versions",
)
def allow_checkpoint_types() -> bool:
    """Allows torch's safe loader to load two kinds of harmless values that fairseq's checkpoints contain.

    The checkpoint of a stock model contains an ``argparse.Namespace``. The checkpoint of a training with
    ``--eval-bleu`` contains numpy arrays, with the counts of BLEU. If these types are not allowed, loading them ends in
    an UnpicklingError about ``weights_only=True``.

    Returns:
        True if this call has changed the types that are allowed.
    """
    if not torch_can_allow_types():
        return False
    allowed_types = torch.serialization.get_safe_globals()
    types_of_checkpoints = [argparse.Namespace, *numpy_classes(), *numpy_functions()]
    missing_types = [item for item in types_of_checkpoints if item not in allowed_types]
    if not missing_types:
        return False
    torch.serialization.add_safe_globals(missing_types)
    return True


def numpy_classes() -> list[type]:
    """Returns the classes that a pickled numpy array or number refers to, for torch's safe loader."""
    # numpy has a class of its own for each dtype. Some versions of numpy have no public name for these two classes.
    int64_dtype = type(np.dtype("int64"))
    float64_dtype = type(np.dtype("float64"))
    return [np.ndarray, np.dtype, int64_dtype, float64_dtype]


def numpy_functions() -> list[Any]:
    """Returns what torch's safe loader needs to unpickle numpy arrays and numbers: the functions that make them.

    A pickle has the module and the name of the function. numpy 1 writes "numpy.core.multiarray.scalar", and numpy 2
    writes "numpy._core.multiarray.scalar". So each function is listed with both names, as pairs. It is also listed
    alone, which stands for the name that it has in the installed numpy.
    """
    make_array = find_unpickling_function(np.zeros(1))
    make_number = find_unpickling_function(np.float64(0))
    return [
        make_array,
        (make_array, "numpy.core.multiarray._reconstruct"),
        (make_array, "numpy._core.multiarray._reconstruct"),
        make_number,
        (make_number, "numpy.core.multiarray.scalar"),
        (make_number, "numpy._core.multiarray.scalar"),
    ]


def find_unpickling_function(value: Any) -> Any:
    """Returns the function that pickle calls to make a value again."""
    function, *_arguments = value.__reduce__()
    return function


def config_types() -> list[Any]:
    """Returns the types that the configuration in a checkpoint of fairseq consists of, for torch's safe loader."""
    return [
        omegaconf.DictConfig,
        omegaconf.ListConfig,
        omegaconf.base.ContainerMetadata,
        omegaconf.base.Metadata,
        omegaconf.nodes.AnyNode,
        Any,  # omegaconf stores the declared type of each value, which may be typing.Any
        dict,
        list,
        int,
        collections.defaultdict,
        fairseq.distributed.utils._TensorPlaceholder,
    ]


@repair(
    "broadcast_object",
    fairseq.distributed.utils,
    symptom="With torch >= 2.6, a training in several processes cannot be resumed: it fails with an UnpicklingError",
    versions="all versions",
    is_needed=torch_can_allow_types,
)
def allow_config_in_broadcast(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.distributed.utils.broadcast_object`` (``original``): allows it to unpickle a configuration.

    When a training in several processes is resumed, the first process sends the checkpoint to the others, together with
    its configuration. Without the repair, torch's safe loader refuses the types of the configuration. They are allowed
    only here, because the sender is trusted, and never in files.
    """
    with torch.serialization.safe_globals(config_types()):
        return original(*args, **kwargs)
