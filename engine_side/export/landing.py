"""A step on its way to the host: handed to the shipper before its copy has landed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine_side.export.plan import StepPlan


@dataclass(slots=True, eq=False)
class LandingStep:
    """The T rows of a plan, as host memory that is valid after `wait()` and until `free()`.

    rows: int16 [T, moe_layers, top_k], -1 = uncaptured, or uint8, 255 = uncaptured. token_ids, positions: int32 [T],
    read from the tensors the forward used. status: uint8 [T], non-zero = not clean: the row counts as missing.
    row_versions: int32 [T] weight versions of rows read back from the slot store, else None. wait: blocks until the
    copy landed; only the shipper's thread calls it. free: gives the ring slot back. stamps, commit_no: int32 [T],
    commit number << 8 | status, and the number they must carry: other rows are left over from another step, or from a
    forward that was never committed. None: not checked. slots, origin: int32 [T], where the rows can be read back, and
    from whose store; None where they cannot. proof: int32 [T], of a repair: the commit each row must be of.
    """

    plan: StepPlan
    rows: NDArray[np.int16] | NDArray[np.uint8]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    status: NDArray[np.uint8]
    row_versions: NDArray[np.int32] | None
    wait: Callable[[], None]
    free: Callable[[], None]
    stamps: NDArray[np.int32] | None = None
    commit_no: int | None = None
    slots: NDArray[np.int32] | None = None
    origin: object = None
    proof: NDArray[np.int32] | None = None

    @property
    def starts(self) -> NDArray[np.int32]:
        """int32 [n]: first positions of the plan's segments, as the device ran them. Valid once landed."""
        return self.positions[self.plan.offsets[:-1]].astype(np.int32)

    def first_rows(self, counts: NDArray[np.int64]) -> LandingStep:
        """The first `counts[i]` rows of each segment, as a step of their own. Copies them: valid once landed."""
        lengths = np.diff(self.plan.offsets)
        place = np.arange(len(self.token_ids)) - np.repeat(self.plan.offsets[:-1], lengths)
        keep = place < np.repeat(counts, lengths)
        picked = {
            name: column[keep]
            for name in ("rows", "token_ids", "positions", "status", "row_versions", "stamps", "slots", "proof")
            if (column := getattr(self, name)) is not None
        }
        return replace(self, plan=self.plan.first_rows(counts), **picked)
