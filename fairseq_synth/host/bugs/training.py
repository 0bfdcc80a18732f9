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


@repair("__init__", DistributedTimeoutWrapper, where=timeout_sends_sigint)
def terminate_on_heartbeat_timeout(init: Any, *args: Any, **kwargs: Any) -> None:
    """``--heartbeat-timeout`` does not end a process that waits for a lost one (all versions).

    It sends SIGINT, which Python handles between its own instructions, but the process waits in a single call of gloo
    or NCCL. SIGTERM ends it.
    """
    call = inspect.signature(init).bind(*args, **kwargs)
    call.arguments.setdefault("signal", signal.SIGTERM)
    init(*call.args, **call.kwargs)
