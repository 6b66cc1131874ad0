"""What the engine's scheduler knows of one step: which rows belong to which life, and as what kind. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    def first_rows(self, counts: NDArray[np.int64]) -> StepPlan:
        """The first `counts[i]` rows of each segment; segments of none are left out."""
        kept = counts > 0
        index = np.cumsum(kept) - 1
        return replace(
            self,
            req_ids=tuple(life for life, stays in zip(self.req_ids, kept, strict=True) if stays),
            starts=self.starts[kept],
            offsets=np.concatenate(([0], np.cumsum(counts[kept]))).astype(np.int32),
            kinds=self.kinds[kept],
            opens=tuple((int(index[at]), name) for at, name in self.opens if kept[at]),
        )
