"""Registers the changes of fairseq (``REPAIRS``), applies each of them once, and lets users switch them off by name.

Most repairs are monkey patches: a function that takes the place of a function or method of fairseq. Its first parameter
is always called ``original``. That is the function that it replaces, and it usually calls it. The other parameters are
those of the original, so ``self`` comes second if a method is replaced. For example::

    @repair("__getitem__", IndexedCachedDataset, symptom="Cached data end in a KeyError", versions="all versions")
    def read_what_is_not_cached(original: Callable[..., Any], self: IndexedCachedDataset, i: int) -> Any:
        # Replaces IndexedCachedDataset.__getitem__ (original): reads an item that is not in the cache yet.
        if i not in self.cache_index:
            self.prefetch([i])
        return original(self, i)

After this repair, ``dataset[3]`` calls ``read_what_is_not_cached(original, dataset, 3)``.

The symptom and the versions of fairseq that have it are rendered into docs/fairseq-bugs.md. The name of the function is
the name by which users switch the repair off. There are two other decorators: `custom_repair` is for a change that is
no replacement of a function, and `parsed_flags.repair_parsed_flags` is for a check of the command line.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import SynthesizerError

logger = logging.getLogger(__name__)

SWITCH = "FAIRSEQ_SYNTH_NO_REPAIRS"  # the environment variable that switches repairs off
MARK = "fairseq_synth_repairs"  # each replacement has an attribute of this name, a tuple with the names of its repairs


class Place(NamedTuple):
    """A function of fairseq, torch or Python that a repair replaces, such as ``FairseqTask.inference_step``.

    Attributes:
        owner: the module or class that has the function, such as ``FairseqTask``.
        attribute: the name of the function, such as "inference_step".
    """

    owner: Any
    attribute: str

    def function(self) -> Any:
        """Returns the function that has this name now, which may be a replacement already."""
        return getattr(self.owner, self.attribute)

    def set_function(self, replacement: Callable[..., Any]) -> None:
        """Puts a replacement in this place. If a static method was there, the replacement becomes one too."""
        # `getattr_static` returns the staticmethod itself; getattr would return the function in it.
        is_static = isinstance(inspect.getattr_static(self.owner, self.attribute), staticmethod)
        # Python would pass `self` to a plain function of a class as the first argument.
        new_value = staticmethod(replacement) if is_static else replacement
        setattr(self.owner, self.attribute, new_value)


# A function that changes fairseq and returns True, or returns False if nothing had to be changed.
ApplyFunction = Callable[[], bool]


class Repair(NamedTuple):
    """A registered repair.

    Attributes:
        symptom: what goes wrong in fairseq without the repair; Markdown, without a full stop.
        versions: the versions of fairseq that have the symptom.
        apply: changes fairseq and returns True, or returns False if nothing had to be changed.
        places: the functions that it replaces, if it is needed; none for a repair that changes something else.
    """

    symptom: str
    versions: str
    apply: ApplyFunction
    places: tuple[Place, ...] = ()


# Each repair by its name.
REPAIRS: dict[str, Repair] = {}


def custom_repair(*, symptom: str, versions: str) -> Callable[[ApplyFunction], ApplyFunction]:
    """Registers the decorated function as a repair that is applied by calling it without arguments.

    The decorated function changes fairseq and returns True. If nothing has to be changed, or it was called before, it
    must change nothing and return False.

    Args:
        symptom: what goes wrong in fairseq without the repair; Markdown, without a full stop.
        versions: the versions of fairseq that have the symptom.
    """

    def register(function: ApplyFunction) -> ApplyFunction:
        """Registers the decorated function, and returns it unchanged."""
        REPAIRS[function.__name__] = Repair(symptom=symptom, versions=versions, apply=function)
        return function

    return register


def always_needed() -> bool:
    """Returns True: every version of fairseq, Python and torch needs the repair."""
    return True


def repair(
    attribute: str, *owners: Any, symptom: str, versions: str, is_needed: Callable[[], bool] = always_needed
) -> Callable[[Any], Any]:
    """Is a decorator: the decorated function takes the place of a function of fairseq, torch or Python.

    The decorated function gets the original function as its first argument, and after it the arguments of the call.
    For example, this repair replaces the method ``FairseqTask.build_model``:

        @repair("build_model", FairseqTask, symptom="No model is announced", versions="all versions")
        def announce_model(original, self, cfg):
            print("builds a model")
            return original(self, cfg)

    The decorator only registers the repair. `apply_repairs` replaces the function.

    Args:
        attribute: the name of the function to replace, such as "build_model".
        owners: the modules or classes that have a function of this name, such as ``FairseqTask``. It is replaced in
            each of them.
        symptom: what goes wrong in fairseq without the repair; Markdown, without a full stop.
        versions: the versions of fairseq that have the symptom.
        is_needed: returns whether the installed fairseq, Python or torch needs the repair.
    """
    places = tuple(Place(owner, attribute) for owner in owners)

    def register(function: Any) -> Any:
        """Registers the decorated function with the arguments of `repair`, and returns it unchanged."""
        register_replacement(function, places, symptom=symptom, versions=versions, is_needed=is_needed)
        return function

    return register


def register_replacement(
    function: Callable[..., Any],
    places: tuple[Place, ...],
    symptom: str,
    versions: str,
    is_needed: Callable[[], bool],
) -> None:
    """Registers a repair: a function that takes the place of functions of fairseq, torch or Python.

    Args:
        function: the function. It gets the original as its first argument. Its name is the name by which users switch
            the repair off.
        places: where the functions are that it replaces.
        symptom: what goes wrong in fairseq without the repair; Markdown, without a full stop.
        versions: the versions of fairseq that have the symptom.
        is_needed: returns whether the installed fairseq, Python or torch needs the repair.
    """
    apply = functools.partial(replace_if_needed, places=places, function=function, is_needed=is_needed)
    REPAIRS[function.__name__] = Repair(symptom=symptom, versions=versions, apply=apply, places=places)


def replace_if_needed(places: tuple[Place, ...], function: Callable[..., Any], is_needed: Callable[[], bool]) -> bool:
    """Applies a repair that `repair` has registered: replaces the functions in all its places, if it is needed.

    Args:
        places: where the functions of fairseq are.
        function: the decorated function, which takes their place.
        is_needed: returns whether the installed fairseq, Python or torch needs the repair.

    Returns:
        True if at least one function was replaced now.
    """
    if not is_needed():
        return False
    num_replaced = 0
    for place in places:
        if replace(place, function):
            num_replaced += 1
    return num_replaced > 0


def apply_repairs() -> None:
    """Applies every registered repair that is not switched off, and logs each that was needed at debug level."""
    set_log_level()
    disabled = disabled_repairs()
    if disabled == {"all"}:
        return
    for name, registered in REPAIRS.items():
        if name in disabled:
            continue
        has_changed_fairseq = registered.apply()
        if has_changed_fairseq:
            logger.debug(f"repaired fairseq: {name}")


def set_log_level() -> None:
    """Lets this module log debug messages only if the environment variable LOGLEVEL, which fairseq reads, is DEBUG.

    Otherwise the level is INFO. It is set here because importing fairseq turns on the debug messages of all libraries
    in a program that configures no logging.
    """
    wants_debug = os.environ.get("LOGLEVEL", "").upper() == "DEBUG"
    logger.setLevel(logging.DEBUG if wants_debug else logging.INFO)


def disabled_repairs() -> set[str]:
    """Returns the names of repairs in the environment variable FAIRSEQ_SYNTH_NO_REPAIRS, which commas separate.

    The result is {"all"} if the variable is ``all``, and empty if it is not set.
    """
    names = os.environ.get(SWITCH, "").split(",")
    return {name.strip() for name in names} - {""}


def check_switch() -> None:
    """Checks that FAIRSEQ_SYNTH_NO_REPAIRS is not set, is ``all``, or has only names of repairs.

    Raises SynthesizerError otherwise.
    """
    disabled = disabled_repairs()
    has_only_names = disabled <= set(REPAIRS)
    if disabled == {"all"} or has_only_names:
        return
    names = ", ".join(sorted(REPAIRS))
    raise SynthesizerError(f"{SWITCH}={os.environ[SWITCH]}: use all, or names separated by commas, from {names}")


def has_repair(function: Callable[..., Any], name: str) -> bool:
    """Returns whether the repair with this name, and perhaps other repairs after it, have replaced a function.

    Args:
        function: the function that is in the place of fairseq's function now.
        name: the name of the repair.
    """
    return name in names_of_repairs(function)


def names_of_repairs(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the repairs that have replaced a function, the first one first; () for an original."""
    names: tuple[str, ...] = getattr(function, MARK, ())
    return names


def mark_repair(replacement: Callable[..., Any], name: str, original: Callable[..., Any]) -> None:
    """Marks a function as the replacement that a repair has made, for `has_repair`.

    Args:
        replacement: the function, which gets an attribute.
        name: the name of the repair.
        original: the function that is replaced. Its own marks are kept, if an earlier repair has made it.
    """
    setattr(replacement, MARK, (*names_of_repairs(original), name))


def replace(place: Place, function: Callable[..., Any]) -> bool:
    """Replaces a function of fairseq by `function`, which gets the original as an additional first argument.

    Several repairs may replace the same function, one after the other. For each of them, the original is the
    replacement of the repair before it. So the last repair is called first, and fairseq's own function at the end.

    Args:
        place: where the function of fairseq is.
        function: the repair; its name is the name of the repair.

    Returns:
        True if the function was replaced now, False if this repair had been made before.
    """
    original = place.function()
    if has_repair(original, function.__name__):
        return False  # For example, this package has been reloaded, or loaded under another name.
    replacement = pass_original(function, original)
    mark_repair(replacement, function.__name__, original)
    place.set_function(replacement)
    return True


def pass_original(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `function` with `original` as its first argument, before those of the call.

    It has the name, the docstring and all other attributes of `original`.
    """

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement
