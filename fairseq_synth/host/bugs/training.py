"""Repairs ``--heartbeat-timeout`` of distributed trainings."""

import inspect
import signal
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
    symptom="`--heartbeat-timeout` does not end a process that waits for a lost one",
    versions="all versions",
    where=timeout_sends_sigint,
)
def terminate_on_heartbeat_timeout(original_init: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces ``DistributedTimeoutWrapper.__init__`` with one whose timeout sends SIGTERM by default, not SIGINT.

    Python handles SIGINT between its own instructions, but a process that waits for a lost one is in a single call of
    gloo or NCCL. SIGTERM ends it.
    """
    call = inspect.signature(original_init).bind(*args, **kwargs)
    call.arguments.setdefault("signal", signal.SIGTERM)
    original_init(*call.args, **call.kwargs)
