"""Runs independent pieces of work on the cores that torch may use, one core for each piece.

torch itself divides every operation among its threads and waits for the slowest one. For a tile that is a wait after
each of some twenty small operations, and each takes as long as a time slice if another process uses one of the cores.
Here a thread computes a whole piece of work by itself and then takes the next one.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def compute_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
    """Computes ``function(item)`` for each item in several threads, and yields the pairs (item, result) in order.

    The caller uses the pairs in its own thread. Nothing is computed before it asks for the first pair.

    Args:
        function: Computes the result of an item. It runs outside autocast and without gradients. The caller must have
            turned gradients off already, as torch does in an autograd function, because the function may run in the
            caller's thread.
        items: The items.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(items) == 1:
        return compute_in_this_thread(function, items)
    return compute_in_pool(function, items, num_threads)


def compute_in_this_thread(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
    """Computes ``function(item)`` for each item in this thread, and yields the pairs (item, result).

    torch may use all cores for each item.
    """
    for item in items:
        with torch.autocast("cpu", enabled=False):
            result = function(item)
        yield item, result
        del result  # Its memory is free for the next result.


def compute_in_pool(
    function: Callable[[Item], Result], items: Sequence[Item], num_threads: int
) -> Iterator[tuple[Item, Result]]:
    """Computes ``function(item)`` for each item in a pool of threads, and yields the pairs (item, result) in order.

    While the caller uses a result, the pool computes later items, and keeps all cores busy. So torch may use only one
    core in the caller's thread.
    """
    pool = thread_pool(num_threads)
    compute = without_gradients(function)
    with one_core_for_this_thread():  # This lasts until the caller has used the last result.
        results = pool.map(compute, items)  # an iterator, which waits for each result
        yield from zip(items, results)


def without_gradients(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    """Returns a function that computes the same as the given function, with gradients turned off.

    It is for the threads of a pool, in which gradients are on at first, whatever the caller's thread has set. Autocast
    is off there, as it should be.
    """
    caller_is_in_inference_mode = torch.is_inference_mode_enabled()

    def compute(item: Item) -> Result:
        """Runs in a thread of the pool."""
        if caller_is_in_inference_mode:
            # The caller's tensors are inference tensors, so the results have to be such tensors, too.
            with torch.inference_mode():  # This turns gradients off as well.
                return function(item)
        with torch.no_grad():
            return function(item)

    return compute


@contextlib.contextmanager
def one_core_for_this_thread() -> Iterator[None]:
    """Makes torch compute on one core in the current thread, until the end of the ``with`` statement."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def thread_pool(num_threads: int) -> ThreadPoolExecutor:
    """Returns a pool of `num_threads` threads, in each of which torch computes on one core.

    Each process makes its pool once and uses it again. A process that has been forked gets a pool of its own, because
    it cannot use the threads of its parent.
    """
    return new_thread_pool(num_threads, process_id=os.getpid())


@cache
def new_thread_pool(num_threads: int, process_id: int) -> ThreadPoolExecutor:
    """Returns a new pool. When it is called again with the same arguments, `cache` returns the same pool."""
    return ThreadPoolExecutor(num_threads, "tiles", initializer=use_one_core)


def use_one_core(*_: Any) -> None:
    """Makes torch compute on one core in the current thread; otherwise it would use as many as in the main thread."""
    torch.set_num_threads(1)
