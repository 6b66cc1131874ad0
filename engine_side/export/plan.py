"""What the engine's scheduler knows of one step: which rows belong to which life, and as what kind. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """n segments over the T rows of one step, in batch order.

    req_ids: life ids (the engine's own, unique per process), one per segment. starts: int32[n], first positions by the
    host's account, -1 where it does not know; the device's positions decide. offsets: int32[n+1] into the rows.
    kinds: uint8[n], see `protocol.messages.Kind`. weight_version: of every row, unless the landing says otherwise.
    opens: (segment index, client request id) for a life's first segment ever.
    """

    step: int
    req_ids: tuple[str, ...]
    starts: NDArray[np.int32]
    offsets: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    weight_version: int
    opens: tuple[tuple[int, str], ...] = ()
