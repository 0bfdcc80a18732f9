"""Registers the changes of fairseq (``REPAIRS``), applies each of them once, and lets users switch them off by name.

A repair is a function that takes the place of a function or method of fairseq. It gets the original function as its
first argument, and after it the arguments of the call, so ``self`` comes second if a method is replaced. For example::

    @repair("__getitem__", IndexedCachedDataset, symptom="Cached data end in a KeyError", versions="all versions")
    def read_what_is_not_cached(original_getitem: Any, self: IndexedCachedDataset, i: int) -> Any:
        # Replaces __getitem__ with one that reads an item into the cache if it is not there yet.
        if i not in self.cache_index:
            self.prefetch([i])
        return original_getitem(self, i)

The symptom and the versions of fairseq that have it are rendered into docs/fairseq-bugs.md. The name of the function is
the one by which users switch the repair off. A change of another kind is written with `custom_repair`.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import SynthesizerError

logger = logging.getLogger(__name__)

SWITCH = "FAIRSEQ_SYNTH_NO_REPAIRS"
MARK = "fairseq_synth_repairs"  # the attribute of a replaced function that lists the repairs in it


class Place(NamedTuple):
    """A function of fairseq, torch or Python that a repair replaces: ``owner.attribute``."""

    owner: Any
    attribute: str

    def function(self) -> Any:
        """Returns the function that is there now."""
        return getattr(self.owner, self.attribute)


class Repair(NamedTuple):
    """A registered repair.

    Attributes:
        symptom: what goes wrong in fairseq without the repair; Markdown, without a full stop.
        versions: the versions of fairseq that have the symptom.
        apply: changes fairseq and returns True, or returns False if nothing had to be changed.
    """

    symptom: str
    versions: str
    apply: Callable[[], bool]


# Each repair by its name.
REPAIRS: dict[str, Repair] = {}
# The functions that the repairs replace, whether or not this version of fairseq needs the repair.
PLACES: list[Place] = []


def custom_repair(*, symptom: str, versions: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Registers the decorated function as a repair that changes fairseq in its own way.

    The function returns whether it has changed fairseq. A second call must return False and change nothing.

    Args:
        symptom: what goes wrong in fairseq without the repair; Markdown, without a full stop.
        versions: the versions of fairseq that have the symptom.
    """

    def register(function: Callable[[], bool]) -> Callable[[], bool]:
        REPAIRS[function.__name__] = Repair(symptom=symptom, versions=versions, apply=function)
        return function

    return register


def always_needed() -> bool:
    """Returns True: every version of fairseq, Python and torch needs the repair."""
    return True


def repair(
    attribute: str, *owners: Any, symptom: str, versions: str, where: Callable[[], bool] = always_needed
) -> Callable[[Any], Any]:
    """Registers the decorated function as a repair that takes the place of ``owner.attribute``; see `replace`.

    Args:
        attribute: the name of the function to replace.
        owners: the modules or classes that have it.
        symptom: what goes wrong in fairseq without the repair; Markdown, without a full stop.
        versions: the versions of fairseq that have the symptom.
        where: returns whether this fairseq, Python or torch needs the repair.
    """
    places = [Place(owner, attribute) for owner in owners]

    def register(function: Any) -> Any:
        def apply() -> bool:
            if not where():
                return False
            changes = [replace(place, function) for place in places]
            return any(changes)

        PLACES.extend(places)
        REPAIRS[function.__name__] = Repair(symptom=symptom, versions=versions, apply=apply)
        return function

    return register


def apply_repairs() -> None:
    """Applies every registered repair that is not switched off, and logs those that were needed at debug level."""
    # LOGLEVEL is fairseq's variable. In a program that configures no logging, importing fairseq turns on the debug
    # messages of all libraries, so this logger needs a level of its own.
    wants_debug = os.environ.get("LOGLEVEL", "").upper() == "DEBUG"
    logger.setLevel(logging.DEBUG if wants_debug else logging.INFO)
    disabled = disabled_repairs()
    if disabled == {"all"}:
        return
    for name, registered in REPAIRS.items():
        if name not in disabled and registered.apply():
            logger.debug(f"repaired fairseq: {name}")


def disabled_repairs() -> set[str]:
    """Returns the names in the environment variable `SWITCH`, where commas separate them; it may be ``all`` alone."""
    names = os.environ.get(SWITCH, "").split(",")
    return {name.strip() for name in names} - {""}


def check_switch() -> None:
    """Checks that `SWITCH` holds names of repairs, or ``all`` alone; raises SynthesizerError otherwise."""
    disabled = disabled_repairs()
    if disabled == {"all"} or disabled <= set(REPAIRS):
        return
    names = ", ".join(sorted(REPAIRS))
    raise SynthesizerError(f"{SWITCH}={os.environ[SWITCH]}: give all, or names joined by commas, from {names}")


def replace(place: Place, function: Callable[..., Any]) -> bool:
    """Replaces a function of fairseq by `function`, which gets the original as its first argument.

    The result is marked with the name of `function`. A second call therefore changes nothing, even if it comes from
    another copy of this package or after a reload.

    Returns:
        True if the function was replaced now, False if it had been replaced before.
    """
    original = place.function()
    marks = getattr(original, MARK, ())
    if function.__name__ in marks:
        return False

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(replacement, MARK, (*marks, function.__name__))
    if isinstance(inspect.getattr_static(place.owner, place.attribute), staticmethod):
        setattr(place.owner, place.attribute, staticmethod(replacement))
    else:
        setattr(place.owner, place.attribute, replacement)
    return True
