"""Capture by reference, commit once.

A router hook only keeps a reference to the layer's `topk_ids`; the commit at the end of the forward turns all layers
into rows. Holding the references until then is what keeps their memory from being reused. Under a CUDA graph both
happen at capture, and every replay commits by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine_side.capture import plain
from engine_side.capture.backend import backend_of
from engine_side.capture.errors import CaptureError
from engine_side.capture.records import Columns, RecordLayout
from engine_side.capture.slot_store import SlotStore
from engine_side.capture.tables import AddressTables

_STATES: Final = 256
"""Steps whose version and number may be on their way to the device at once."""


@dataclass(slots=True, frozen=True, eq=False)
class StepRows:
    """T committed rows. records: uint8 [T, stride] of the recorder's own memory, which the next commit overwrites.
    commit_no: number of the commit that wrote them."""

    records: Tensor
    layout: RecordLayout
    commit_no: int

    @property
    def rows(self) -> Tensor:
        """View of the ids, int16 or uint8 [T, moe_layers, top_k]."""
        ids = self.records[:, : self.layout.row_bytes]
        if not self.layout.narrow:
            ids = ids.view(torch.int16)
        return ids.unflatten(1, self.layout.geometry.row_shape)

    @property
    def status(self) -> Tensor:
        """View of the status bits, uint8 [T]."""
        return self.records[:, self.layout.trailer_at + 8]

    def columns(self) -> Columns:
        """A copy on the host, once the current stream has got there."""
        return self.layout.split(self.records.cpu().numpy().copy(), len(self.records))


class RouteRecorder:
    """Rows of one model, at most `max_tokens` a forward, padding included.

    `begin` numbers a step; commits of forwards outside any step carry number 0, which proves nothing.
    """

    def __init__(
        self, layout: RecordLayout, max_tokens: int, device: torch.device, store: SlotStore | None = None
    ) -> None:
        self.layout = layout
        self.geometry = layout.geometry
        self.max_tokens = max_tokens
        self.store = store
        self.commit_no = 0
        self.unreported: set[int] = set()
        """Global ids of layers that did not report in some commit."""
        self._device = device
        self._backend = backend_of(device)
        self._cuda = device.type == "cuda"
        self._records = torch.zeros((max_tokens, layout.stride), dtype=torch.uint8, device=device)
        self._part = self._records
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        states = torch.zeros((_STATES, 2), dtype=torch.int64, pin_memory=self._cuda)
        self._states = (list(states), states.numpy())
        layers = self.geometry.num_moe_layers
        self._tables = AddressTables(layers, device) if self._backend is not plain else None
        self._staging: Tensor | None = None
        self._kept: list[Tensor | None] = [None] * layers
        self._calls = [0] * layers
        self._keeping = False

    @property
    def nbytes(self) -> int:
        """Bytes of the step's rows on the device."""
        return self._records.numel()

    def begin(self, weight_version: int) -> int:
        """Number the step that is launched next, on the current stream; its rows carry `weight_version`. Forget what
        forwards since the last commit kept. Returns the number."""
        self.drop()
        self.commit_no += 1
        self._set_state(weight_version, self.commit_no)
        if self._tables is not None and self._tables.pending:
            self._tables.fill()
        return self.commit_no

    def idle(self) -> None:
        """Forwards from here on belong to no step: what they commit proves nothing."""
        self.drop()
        self._set_state(0, 0)
        if self._tables is not None and self._tables.pending:
            self._tables.fill()

    def _set_state(self, version: int, number: int) -> None:
        rows, values = self._states
        at = self.commit_no % _STATES
        values[at] = version, number
        self._state.copy_(rows[at], non_blocking=True)

    def keep(self, moe_index: int, topk_ids: Tensor) -> None:
        """Remember what the router of captured layer `moe_index` chose: integer [T, >= top_k], logical expert ids."""
        self._kept[moe_index] = topk_ids
        self._calls[moe_index] += 1
        self._keeping = True

    def keep_copy(self, moe_index: int, topk_ids: Tensor) -> None:
        """As `keep`, of memory that a compiler may reuse before the commit although somebody refers to it."""
        if self._staging is None:
            shape = (len(self._kept), self.max_tokens, self.geometry.top_k)
            self._staging = torch.zeros(shape, dtype=torch.int32, device=self._device)
        width = min(self.geometry.top_k, topk_ids.shape[1])
        copy = self._staging[moe_index, : topk_ids.shape[0], :width]
        copy.copy_(topk_ids[:, :width])
        self.keep(moe_index, copy)

    def drop(self) -> None:
        """Forget what was kept: a forward that is not committed."""
        if not self._keeping:
            return
        self._keeping = False
        self._kept = [None] * len(self._kept)
        self._calls = [0] * len(self._calls)

    def rows(self, num_tokens: int) -> StepRows:
        """The rows of the step begun last, wherever its commit ran: in this forward, or in a graph that was replayed.
        Rows that no commit of this step wrote carry another step's number."""
        if len(self._part) != num_tokens:
            self._part = self._records[:num_tokens]
        return StepRows(self._part, self.layout, self.commit_no)

    def commit(self, slots: Tensor, positions: Tensor, input_ids: Tensor, num_tokens: int) -> StepRows:
        """Rows of the first `num_tokens` tokens of the forward, in batch order, stored under their KV slots too.

        slots: int [>= num_tokens], -1 = pad. positions, input_ids: integer [>= num_tokens], those that the forward
        used. All one-dimensional. A layer that did not report is -1, and so is an id out of range. Raises CaptureError
        when inputs or a layer disagree in length, or a router ran more than once: then every row it could write is
        uncaptured, so that no slot shows its previous occupant.
        """
        inputs = (("slots", slots), ("positions", positions), ("input_ids", input_ids))
        problem = next((f"{name} only {len(x)}" for name, x in inputs if len(x) < num_tokens), None)
        if num_tokens > self.max_tokens:
            problem = f"the rows of a forward only {self.max_tokens}"
        if problem is not None:
            problem = f"the step has {num_tokens} tokens, {problem}"
        fit = min(num_tokens, self.max_tokens, *(len(x) for _, x in inputs))
        kept, wrong = self._usable(num_tokens)
        problem = problem or wrong
        if problem is not None:
            kept = [None] * len(kept)
        if fit:
            self._launch(kept, slots, positions, input_ids, fit)
        # Only behind the launch: until it is enqueued nothing may take their memory.
        self.drop()
        if problem is not None:
            raise CaptureError(problem)
        return self.rows(num_tokens)

    def _usable(self, num_tokens: int) -> tuple[list[Tensor | None], str | None]:
        layer_ids = self.geometry.moe_layer_ids
        for index, (kept, calls) in enumerate(zip(self._kept, self._calls, strict=True)):
            if calls > 1:
                return self._kept, f"layer {layer_ids[index]}: its router ran {calls} times in one forward"
            if kept is None:
                self.unreported.add(layer_ids[index])
            elif kept.ndim != 2 or kept.shape[0] < num_tokens:
                return (
                    self._kept,
                    f"layer {layer_ids[index]}: routes of shape {tuple(kept.shape)} for {num_tokens} tokens",
                )
        return self._kept, None

    def _launch(
        self, kept: list[Tensor | None], slots: Tensor, positions: Tensor, input_ids: Tensor, count: int
    ) -> None:
        store = None if self.store is None else self.store.tensors
        if self._tables is None:
            plain.commit(kept, slots, positions, input_ids, self._state, self._records, store, count, self.layout)
            return
        kept, wide = _alike(kept)
        capturing = self._cuda and torch.cuda.is_current_stream_capturing()
        make = self._tables.captured if capturing else self._tables.eager
        table = make(kept, self.geometry.top_k)
        self._backend.commit(
            table, wide, slots, positions, input_ids, self._state, self._records, store, count, self.layout
        )
        # `kept` may hold casts made here: like the references, they live until the launch.
        del kept


def _alike(kept: list[Tensor | None]) -> tuple[list[Tensor | None], bool]:
    """Ids that the kernel reads as they lie: all int64 or all int32, columns next to each other."""
    wide = all(x.dtype == torch.int64 for x in kept if x is not None)
    dtype = torch.int64 if wide else torch.int32
    same = all(x is None or (x.dtype == dtype and x.stride(1) == 1) for x in kept)
    return (kept if same else [None if x is None else x.to(dtype).contiguous() for x in kept]), wide
