"""Committed rows to host memory: as they are on the CPU, through pinned buffers and a stream of its own on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_side.capture.recorder import StepRows
from engine_side.capture.records import Columns, RecordLayout
from engine_side.capture.slot_store import SlotStore
from engine_side.capture.streams import OnStream
from engine_side.export.landing import LandingStep
from engine_side.export.pinned import Pinned, PinnedPool
from engine_side.export.plan import StepPlan

CHUNK_BYTES: Final = 32 << 20
"""Prefix rows read back at once, at most: bounds the device memory a long prefix hit takes."""

_ASKED_BYTES: Final = 12
"""Slot, token id and position of a row that is read back."""


def nothing() -> None:
    """Nothing to wait for, or to give back."""


class StepExporter:
    """Starts the copy of a step to the host. Never blocks the engine thread. `pool` is None on the CPU.

    Everything it reads is memory that is written again: by the next commit, by the next read. So before such a write,
    the writing stream waits *on the device* for the copy (`before_commit`), and the host for nothing.
    """

    def __init__(self, layout: RecordLayout, device: torch.device) -> None:
        self._device = device
        self._layout = layout
        self.rows_per_chunk = max(1, CHUNK_BYTES // (layout.stride + _ASKED_BYTES))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._on_stream = OnStream(self._stream)
        self.pool = PinnedPool() if device.type == "cuda" else None
        self._committed = torch.cuda.Event() if device.type == "cuda" else None
        self._step: Pinned | None = None
        self._prefix: Pinned | None = None
        self._chunk: Tensor | None = None
        self._asked: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device, of prefix rows on their way."""
        return sum(x.numel() * x.element_size() for x in (self._chunk, self._asked) if x is not None)

    def before_commit(self) -> None:
        """Have the current stream wait for the copy of the last step's rows: call it before the next forward."""
        self._wait_for(self._step)

    def export(self, plan: StepPlan, rows: StepRows) -> LandingStep:
        """A landing step for `plan`; the copy starts behind what the current stream holds. Raises PinnedFull."""
        columns, wait, free, self._step = self._copy(rows.records)
        return LandingStep(
            plan, columns.rows, columns.token_ids, columns.positions, columns.status, None, wait, free,
            columns.stamps, rows.commit_no, columns.slots, self,
        )  # fmt: skip

    def read(
        self,
        plan: StepPlan,
        store: SlotStore,
        asked: NDArray[np.int32],
        max_commit: int,
        proof: NDArray[np.int32] | None = None,
    ) -> LandingStep:
        """A landing step of rows read back from the store, at most `rows_per_chunk`. asked: int32 [3, N]: slots, token
        ids, positions. proof: int32 [N], of a repair: the commits they must be of. Raises PinnedFull."""
        count = asked.shape[1]
        chunk = self._chunk_of(count)
        self._wait_for(self._prefix)
        on_device, give = self._upload(asked)
        try:
            store.read(on_device, max_commit, chunk)
            columns, wait, free, self._prefix = self._copy(chunk[:count])
        except BaseException:
            give()
            raise

        def free_both() -> None:
            free()
            give()

        return LandingStep(
            plan, columns.rows, columns.token_ids, columns.positions, columns.status, columns.versions, wait, free_both,
            columns.stamps, None, asked[0], self, proof,
        )  # fmt: skip

    def _wait_for(self, copied: Pinned | None) -> None:
        """Have the current stream wait until `copied` has landed, unless it is known to have."""
        if copied is not None and copied.on_its_way and copied.landed is not None:
            torch.cuda.current_stream(self._device).wait_event(copied.landed)

    def drain(self) -> None:
        """Wait until every copy has landed: before what they read is freed."""
        if self._stream is not None:
            self._stream.synchronize()

    def drop(self) -> None:
        """Let go of the device, behind `drain`: steps that were handed over refer to this exporter until they left."""
        self._chunk = self._asked = None

    def _chunk_of(self, count: int) -> Tensor:
        if self._chunk is None or len(self._chunk) < count:
            size = min(self.rows_per_chunk, 1 << (count - 1).bit_length())
            self._chunk = torch.zeros((size, self._layout.stride), dtype=torch.uint8, device=self._device)
            self._asked = torch.zeros((3, size), dtype=torch.int32, device=self._device)
            if self._stream is not None:
                # When a longer one takes its place, this one may still be on its way out.
                self._chunk.record_stream(self._stream)
        return self._chunk

    def _upload(self, asked: NDArray[np.int32]) -> tuple[Tensor, Callable[[], None]]:
        if self.pool is None:
            return torch.from_numpy(asked), nothing
        pool, buffer = self.pool, self.pool.take(asked.nbytes)
        host = buffer.memory[: asked.nbytes].view(torch.int32).view(3, -1)
        host.numpy()[:] = asked
        assert self._asked is not None
        on_device = self._asked.view(-1)[: asked.size].view(3, -1)
        on_device.copy_(host, non_blocking=True)
        return on_device, lambda: pool.give(buffer)

    def _copy(self, records: Tensor) -> tuple[Columns, Callable[[], None], Callable[[], None], Pinned | None]:
        """Records [n, stride] on their way: where they land, what waits for them, what gives that memory back."""
        if self._stream is None or self.pool is None:
            return self._layout.split(records.clone().numpy(), len(records)), nothing, nothing, None
        pool, buffer = self.pool, self.pool.take(records.numel())
        target, columns = buffer.views(self._layout, len(records))
        landed = buffer.landed
        assert landed is not None
        assert self._committed is not None
        self._committed.record()
        self._stream.wait_event(self._committed)
        with self._on_stream:
            target.copy_(records, non_blocking=True)
        landed.record(self._stream)
        return columns, landed.synchronize, lambda: pool.give(buffer), buffer
