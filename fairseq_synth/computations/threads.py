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

    There are as many threads as torch may use. From the first result to the last, torch's own number of threads is set
    to 1, in these threads and in the caller's, because each core is busy with an item. So the caller has to take all
    results, or close the iterator.

    The function runs outside autocast. It runs without gradients: the caller must have turned them off, as torch does
    in an autograd function, and they are turned off here in each new thread.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(items) == 1:
        # All in the caller's thread. torch may use all cores for each item.
        for item in items:
            yield call_without_autocast(function, item)
        return

    is_inference = torch.is_inference_mode_enabled()

    def run(item: Item) -> Result:
        # Each thread has modes of its own. In a new thread, autocast is off, as it should be. But gradients are on, and
        # inference mode is off.
        with torch.inference_mode(is_inference), torch.no_grad():
            return function(item)

    pool = thread_pool(os.getpid(), num_threads)  # The pool of this process, not of the one that it was forked from.
    torch.set_num_threads(1)
    try:
        yield from pool.map(run, items)
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
