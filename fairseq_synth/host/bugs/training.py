"""Repairs ``--heartbeat-timeout`` of distributed trainings."""

import inspect
import signal
from collections.abc import Callable
from typing import Any

from fairseq.distributed import DistributedTimeoutWrapper

from ..repairs import repair


def timeout_sends_sigint() -> bool:
    """Returns whether the timeout of `DistributedTimeoutWrapper` sends SIGINT by default."""
    parameters = inspect.signature(DistributedTimeoutWrapper.__init__).parameters
    return "signal" in parameters and parameters["signal"].default is signal.SIGINT


@repair(
    "__init__",
    DistributedTimeoutWrapper,
    symptom="`--heartbeat-timeout` does not stop a process that waits for a process that has died",
    versions="all versions",
    is_needed=timeout_sends_sigint,
)
def terminate_on_heartbeat_timeout(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Replaces ``DistributedTimeoutWrapper.__init__`` (``original``): the timeout sends SIGTERM by default.

    fairseq sends SIGINT to a process that has made no progress for ``--heartbeat-timeout`` seconds. Python handles
    SIGINT only between its own instructions, but a process that waits for a lost process is inside a single call of
    gloo or NCCL. SIGTERM ends it.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    call.arguments.setdefault("signal", signal.SIGTERM)
    original(*call.args, **call.kwargs)
