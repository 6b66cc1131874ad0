"""The engine's process of the path bench: a real shipper, fed with landed steps as fast as it takes them."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.shipper import Shipper
from protocol.messages import Kind
from tests.bench.assembly import GEOMETRY


def main() -> None:
    """Print {"rate": patches a second}, from the first step to the last acknowledgement."""
    collector, steps, requests, seed = sys.argv[1], *map(int, sys.argv[2:])
    rng = np.random.default_rng(seed)
    shipper = Shipper(collector, GEOMETRY, "bench", window_cap_bytes=1 << 30)
    shipper.start()
    rows = rng.integers(0, 256, (requests, 61, 8)).astype(np.int16)
    ids = tuple(str(i) for i in range(requests))
    offsets = np.arange(requests + 1, dtype=np.int32)
    kinds = np.full(requests, Kind.FORWARD, np.uint8)
    clean = np.zeros(requests, np.uint8)
    tokens = np.zeros(requests, np.int32)

    def landed(step: int) -> LandingStep:
        at = np.full(requests, step, np.int32)
        opens = tuple((i, f"request-{i}") for i in range(requests)) if step == 0 else ()
        plan = StepPlan(step, ids, at, offsets, kinds, 0, opens)
        return LandingStep(plan, rows, tokens, at, clean, None, _nothing, _nothing)

    shipper.put(landed(0))
    _acknowledged(shipper, 1)
    made = [landed(i) for i in range(1, steps)]
    started = time.perf_counter()
    for step in made:
        shipper.put(step)
    _acknowledged(shipper, steps)
    took = time.perf_counter() - started
    assert shipper.stats().rows_lost == 0
    assert shipper.close(10.0)
    print(json.dumps({"rate": (steps - 1) / took}))


def _acknowledged(shipper: Shipper, count: int) -> None:
    while shipper.stats().acked_seq < count - 1:
        time.sleep(0.001)


def _nothing() -> None:
    """Nothing to wait for, nothing to give back."""


if __name__ == "__main__":
    main()
