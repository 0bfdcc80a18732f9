"""The list of repairs: each is one function, applied once, logged when applied, and can be switched off by name."""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from ..errors import SynthesizerError

logger = logging.getLogger(__name__)

SWITCH = "FAIRSEQ_SYNTH_NO_REPAIRS"
MARK = "fairseq_synth_repairs"  # the attribute of a replaced function that names what replaced it

REPAIRS: dict[str, Callable[[], bool]] = {}


def listed(function: Callable[[], bool]) -> Callable[[], bool]:
    """Adds a repair to `REPAIRS`. Called, it returns whether it has changed anything; a second call changes nothing."""
    REPAIRS[function.__name__] = function
    return function


def repair(attribute: str, *owners: Any, where: Callable[[], bool] = lambda: True) -> Callable[[Any], Any]:
    """Adds the decorated function to `REPAIRS`; it is to take the place of ``owner.attribute``, see `replace`.

    Args:
        attribute: the name of a function.
        owners: modules or classes that have it.
        where: says whether the repair is needed with this fairseq, Python and so on.
    """

    def add(function: Any) -> Any:
        @functools.wraps(function)
        def apply() -> bool:
            return where() and any([replace(owner, attribute, function) for owner in owners])

        listed(apply)
        return function

    return add


def apply_repairs() -> None:
    """Applies every repair listed so far that is not switched off, and logs at debug level which ones were needed."""
    # LOGLEVEL is fairseq's. Without it, where nobody configures logging, importing fairseq turns on everybody's DEBUG.
    logger.setLevel(logging.DEBUG if os.environ.get("LOGLEVEL", "").upper() == "DEBUG" else logging.INFO)
    off = switched_off()
    for name, apply in REPAIRS.items():
        if off != {"all"} and name not in off and apply():
            logger.debug(f"repaired fairseq: {name}")


def switched_off() -> set[str]:
    """The names in the environment variable `SWITCH`, which are joined by commas; ``all`` alone stands for each."""
    return {name.strip() for name in os.environ.get(SWITCH, "").split(",")} - {""}


def check_switch() -> None:
    """Raises SynthesizerError if `SWITCH` holds anything but names of repairs, or ``all`` alone."""
    if switched_off() != {"all"} and not switched_off() <= set(REPAIRS):
        raise SynthesizerError(
            f"{SWITCH}={os.environ[SWITCH]}: give all, or names joined by commas, from {', '.join(sorted(REPAIRS))}"
        )


def replace(owner: Any, attribute: str, function: Callable[..., Any]) -> bool:
    """Puts `function` in the place of ``owner.attribute``; what it replaces is its first argument.

    Args:
        owner: a module or class.
        function: its name marks the result, so that a second call changes nothing, not even one by another copy of
            this package.

    Returns:
        Whether the attribute was replaced now.
    """
    replaced = getattr(owner, attribute)
    marks = getattr(replaced, MARK, ())
    if function.__name__ in marks:
        return False

    @functools.wraps(replaced)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(replaced, *args, **kwargs)

    setattr(replacement, MARK, (*marks, function.__name__))
    if isinstance(inspect.getattr_static(owner, attribute), staticmethod):
        setattr(owner, attribute, staticmethod(replacement))
    else:
        setattr(owner, attribute, replacement)
    return True
