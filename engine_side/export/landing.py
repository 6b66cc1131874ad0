"""A step on its way to the host: handed to the shipper before its copy has landed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    forward that was never committed. None: not checked.
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
