"""Runs independent pieces of work on the cores that torch may use, one core for each piece.

torch itself divides every operation among its threads and waits for the slowest one. For a tile that is a wait after
each of some twenty small operations, and each takes as long as a time slice if another process uses one of the cores.
Here a thread computes a whole piece of work by itself and then takes the next one.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yields the result of ``function(item)`` for each item, in their order, computed by several threads.

    There are as many threads as torch may use. Each computes on one core. In the caller's thread, too, torch uses one
    core from the first result to the last. It gets its number of threads back when the iterator ends, so that the
    caller has to take all results, or close the iterator.

    The function runs outside autocast and without gradients. The caller must have turned gradients off, as torch does
    in an autograd function.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(items) == 1:
        # All in the caller's thread. torch may use all cores for each item.
        for item in items:
            yield call_without_autocast(function, item)
        return

    # Autocast, gradients and inference mode are set for each thread on its own. In the threads of the pool, autocast is
    # off, as it should be. But gradients are on and inference mode is off, whatever the caller has set.
    is_inference = torch.is_inference_mode_enabled()

    def call_in_modes_of_caller(item: Item) -> Result:
        with torch.inference_mode(is_inference), torch.no_grad():
            return function(item)

    pool = thread_pool(os.getpid(), num_threads)
    torch.set_num_threads(1)
    try:
        yield from pool.map(call_in_modes_of_caller, items)
    finally:
        torch.set_num_threads(num_threads)


def call_without_autocast(function: Callable[[Item], Result], item: Item) -> Result:
    """Returns ``function(item)``, computed outside autocast."""
    with torch.autocast("cpu", enabled=False):
        return function(item)


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
