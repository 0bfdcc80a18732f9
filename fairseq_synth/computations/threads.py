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
    """Yields the results of ``function(item)`` in the order of the items, computed by as many threads as torch has.

    The function runs without gradients, as in an autograd function, and outside autocast.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(items) == 1:
        with torch.autocast("cpu", enabled=False):
            for item in items:
                yield function(item)
        return

    is_inference = torch.is_inference_mode_enabled()

    def run(item: Item) -> Result:
        # These modes belong to a thread: a new one has gradients, and neither inference mode nor autocast.
        with torch.inference_mode(is_inference), torch.no_grad():
            return function(item)

    pool = thread_pool(os.getpid(), num_threads)
    torch.set_num_threads(1)
    try:
        yield from pool.map(run, items)
    finally:
        torch.set_num_threads(num_threads)


@cache
def thread_pool(process_id: int, num_threads: int) -> ThreadPoolExecutor:
    """Returns the threads of this process, each of which uses one core. A forked process needs threads of its own."""
    # Each thread that torch sees for the first time takes over the number of threads that is set at the moment.
    return ThreadPoolExecutor(num_threads, "tiles", initializer=use_one_core)


def use_one_core(*_: Any) -> None:
    """Makes torch compute on one core in the current thread."""
    torch.set_num_threads(1)
