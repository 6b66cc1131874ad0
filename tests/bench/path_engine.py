"""The engine's process of the path bench: a real shipper, fed with landed steps as fast as it takes them."""

from __future__ import annotations

import json
import sys
import time

from engine_side.shipping.shipper import Shipper
from tests.bench.assembly import GEOMETRY
from tests.bench.path_steps import Steps

BURST = 16
AHEAD = 256
"""Steps that may be unacknowledged: more than keep the path busy, and no engine runs further ahead of its shipper."""


def main() -> None:
    """`ENDPOINT N SEED [KEYS]` prints {"rate": patches a second}, from the second step to the last acknowledgement."""
    collector, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    shipper = Shipper(collector, GEOMETRY, "bench", keys=sys.argv[4] if len(sys.argv) > 4 else None)
    shipper.start()
    steps = Steps(seed)
    shipper.put(steps.landed(0))
    _acknowledged(shipper, 1)
    made = [steps.landed(i) for i in range(1, count)]
    started = time.perf_counter()
    for ahead in range(0, len(made), BURST):
        _acknowledged(shipper, ahead - AHEAD)
        for step in made[ahead : ahead + BURST]:
            shipper.put(step)
    _acknowledged(shipper, count)
    took = time.perf_counter() - started
    assert shipper.stats().rows_lost == 0
    assert shipper.close(10.0)
    print(json.dumps({"rate": (count - 1) / took}))


def _acknowledged(shipper: Shipper, count: int) -> None:
    while shipper.stats().acked_seq < count - 1:
        time.sleep(0.001)


if __name__ == "__main__":
    main()
