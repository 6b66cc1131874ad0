"""One engine process: `python -m tests.chaos.engine COLLECTOR NAME SEED`. Steps at a steady pace until its stdin
closes, prints each request's id as it ends, and at the end how long its hand-offs took."""

from __future__ import annotations

import json
import select
import sys
import time

import numpy as np

from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.shipper import Shipper
from protocol.messages import Kind
from tests.chaos.witness import Witness
from tests.harness.patches import SMALL

AT_ONCE = 6
STEP_S = 0.02
_DRAIN_S = 60.0


class _Run:
    """A request under way."""

    def __init__(self, seed: int, request_id: str, life: str) -> None:
        self.request_id, self.life, self.at = request_id, life, 0
        self.witness = Witness(seed, request_id)

    def take(self) -> int:
        """Rows of the next step."""
        return self.witness.prompt if self.at == 0 else 1

    @property
    def over(self) -> bool:
        return self.at == len(self.witness.rows)


def main() -> None:
    collector, name, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    shipper = Shipper(collector, SMALL, name)
    shipper.start()
    runs: list[_Run] = []
    opened = steps = 0
    spent: list[float] = []
    began = time.monotonic()
    ending = False
    while runs or not ending:
        ending = ending or bool(select.select([sys.stdin], [], [], 0)[0])
        while len(runs) < AT_ONCE and not ending:
            runs.append(_Run(seed, f"{name}/{opened}", str(opened)))
            opened += 1
        if runs:
            step = _step(runs, steps)
            handed = time.perf_counter()
            shipper.put(step)
            for run in [run for run in runs if run.over]:
                shipper.finish(run.life, len(run.witness.rows) + 1, "stop")
            spent.append(time.perf_counter() - handed)
            for run in [run for run in runs if run.over]:
                print(json.dumps({"done": run.request_id}), flush=True)
            runs = [run for run in runs if not run.over]
        steps += 1
        time.sleep(max(0.0, began + steps * STEP_S - time.monotonic()))
    took = time.monotonic() - began
    drained = shipper.close(_DRAIN_S)
    handed_us = np.quantile(spent, [0.5, 0.99, 1.0]) * 1e6
    stats = shipper.stats()
    print(
        json.dumps(
            {
                "drained": drained,
                "requests": opened,
                "pace": steps * STEP_S / took,
                "hand_off_us": [round(float(x), 1) for x in handed_us],
                "rows_dropped": stats.rows_lost,
            }
        ),
        flush=True,
    )


def _step(runs: list[_Run], number: int) -> LandingStep:
    counts = [run.take() for run in runs]
    opens = tuple((i, run.request_id) for i, run in enumerate(runs) if run.at == 0)
    parts = [(run, run.at, run.at + n) for run, n in zip(runs, counts, strict=True)]
    for run, n in zip(runs, counts, strict=True):
        run.at += n
    return LandingStep(
        plan=StepPlan(
            step=number,
            req_ids=tuple(run.life for run in runs),
            starts=np.array([a for _, a, _ in parts], np.int32),
            offsets=np.cumsum([0, *counts]).astype(np.int32),
            kinds=np.full(len(runs), Kind.FORWARD, np.uint8),
            weight_version=0,
            opens=opens,
        ),
        rows=np.concatenate([run.witness.rows[a:b] for run, a, b in parts]),
        token_ids=np.concatenate([run.witness.tokens[a:b] for run, a, b in parts]),
        positions=np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in parts]),
        status=np.zeros(sum(counts), np.uint8),
        row_versions=None,
        wait=_nothing,
        free=_nothing,
    )


def _nothing() -> None:
    """The arrays are this step's own."""


if __name__ == "__main__":
    main()
