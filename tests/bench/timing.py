"""Times of several pieces of work, interleaved, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

BLOCK = 40
"""Calls of one piece of work in a row: caches are as warm as in a process that does nothing else, and a burst of noise
still falls on all of them."""


def interleaved(
    work: Mapping[str, Callable[[int], object]],
    blocks: int,
    renew: Callable[[str, int], object],
) -> dict[str, float]:
    """Median seconds of each function, called as `f(i)` with i rising, no garbage collection.
    The first block warms. renew: called with the name and the block number before each block, untimed."""
    times: dict[str, list[float]] = {name: [] for name in work}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for block in range(blocks + 1):
            for name, function in work.items():
                renew(name, block)
                for i in range(block * BLOCK, (block + 1) * BLOCK):
                    started = time.perf_counter()
                    function(i)
                    took = time.perf_counter() - started
                    if block:
                        times[name].append(took)
    finally:
        if enabled:
            gc.enable()
    return {name: sorted(each)[len(each) // 2] for name, each in times.items()}
