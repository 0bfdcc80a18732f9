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


def compute_in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], take_result: Callable[[Item, Result], None]
) -> None:
    """Computes ``function(item)`` for each item in several threads, and calls ``take_result(item, result)`` for each.

    The function runs outside autocast and without gradients. The caller must have turned gradients off, as torch does
    in an autograd function: if torch may use only one thread, the function runs in the thread of the caller.

    Args:
        function: Computes the result of an item, in any thread.
        items: The items.
        take_result: Takes the result of an item. It runs in the caller's thread, in the order of the items.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(items) == 1:
        compute_in_this_thread(function, items, take_result)
    else:
        compute_in_pool(function, items, take_result, num_threads)


def compute_in_this_thread(
    function: Callable[[Item], Result], items: Sequence[Item], take_result: Callable[[Item, Result], None]
) -> None:
    """Computes ``function(item)`` for each item in this thread, and calls ``take_result(item, result)`` after each.

    torch may use all cores for each item.
    """
    for item in items:
        with torch.autocast("cpu", enabled=False):
            result = function(item)
        take_result(item, result)


def compute_in_pool(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    take_result: Callable[[Item, Result], None],
    num_threads: int,
) -> None:
    """Computes ``function(item)`` for each item in a pool of threads, and calls ``take_result(item, result)`` for each.

    The function runs in `num_threads` threads, each on one core, without gradients and outside autocast.
    ``take_result`` runs in this thread, in the order of the items, while the pool computes later items.
    """
    pool = thread_pool(os.getpid(), num_threads)  # A forked process gets a pool of its own.
    compute = with_settings_of_this_thread(function)
    # While the threads of the pool use all cores, `take_result` must not spread over them, too.
    with one_core_for_this_thread():
        # `map` starts all computations at once. Each step of the loop waits for the result of one item.
        results = pool.map(compute, items)
        for item, result in zip(items, results, strict=True):
            take_result(item, result)


def with_settings_of_this_thread(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    """Returns the function for a thread of the pool: without gradients, and in inference mode if this thread is in it.

    A thread of the pool has torch's default settings, and not those of the thread that started it. By default,
    gradients are on, and inference mode and autocast are off.
    """
    caller_is_in_inference_mode = torch.is_inference_mode_enabled()

    def compute_without_gradients(item: Item) -> Result:
        """Runs in a thread of the pool."""
        with torch.inference_mode(caller_is_in_inference_mode), torch.no_grad():
            return function(item)

    return compute_without_gradients


@contextlib.contextmanager
def one_core_for_this_thread() -> Iterator[None]:
    """Makes torch compute on one core in the current thread, until the end of the ``with`` statement."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@cache
def thread_pool(process_id: int, num_threads: int) -> ThreadPoolExecutor:
    """Returns a pool of `num_threads` threads, on each of which torch computes on one core.

    A pool is made once and used again. A process that has been forked cannot use the threads of its parent, so
    `process_id` tells their pools apart.
    """
    return ThreadPoolExecutor(num_threads, "tiles", initializer=use_one_core)


def use_one_core(*_: Any) -> None:
    """Makes torch compute on one core in the current thread; otherwise it would use as many as in the main thread."""
    torch.set_num_threads(1)
