"""Where a commit finds each layer's ids: tables of addresses on the device, built once, valid on every graph replay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_EAGER: Final = 128
_CAPTURED: Final = 256
"""Tables kept for eager forwards (the allocator gives the same few addresses again), and made ahead for graphs."""


class AddressTables:
    """Tables int64 [3 x moe_layers]: address, row stride in elements, columns that hold ids.

    A table that a captured graph reads is never used for anything else; it is zero, "no layer reported", until `fill`.
    So a replay that comes before it finds nothing rather than an address of somebody else.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self._pinned = device.type == "cuda"
        self._eager, self._eager_host = self._slab(_EAGER)
        self._known: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._graphs: list[tuple[Tensor, Tensor]] = [self._slab(_CAPTURED)]
        self._used = 0
        self._unfilled: list[int] = []

    def eager(self, kept: Sequence[Tensor | None], top_k: int) -> Tensor:
        """The table of these tensors, on the device when the current stream gets to it."""
        key = _addresses(kept, top_k)
        index = self._known.get(key)
        if index is not None:
            self._known.move_to_end(key)
            return self._eager[index]
        index = len(self._known) if len(self._known) < _EAGER else self._known.popitem(last=False)[1]
        self._known[key] = index
        host, table = self._eager_host[index], self._eager[index]
        host.copy_(torch.tensor(key, dtype=torch.int64))
        table.copy_(host, non_blocking=True)
        return table

    def captured(self, kept: Sequence[Tensor | None], top_k: int) -> Tensor:
        """The table of a graph under capture: a place of its own, filled at the next `fill`. Raises RuntimeError when
        more graphs were captured since the last `fill` than places were made ahead."""
        slab, at = divmod(self._used, _CAPTURED)
        if slab >= len(self._graphs):
            raise RuntimeError(f"{self._used} graphs were captured without a step between them")
        table, host = (each[at] for each in self._graphs[slab])
        host.copy_(torch.tensor(_addresses(kept, top_k), dtype=torch.int64))
        self._unfilled.append(self._used)
        self._used += 1
        return table

    def fill(self) -> None:
        """Enqueue what captured graphs are missing, on the current stream, which must not be capturing."""
        for index in self._unfilled:
            slab, at = divmod(index, _CAPTURED)
            self._graphs[slab][0][at].copy_(self._graphs[slab][1][at], non_blocking=True)
        self._unfilled.clear()
        if self._used + _CAPTURED // 2 > len(self._graphs) * _CAPTURED:
            self._graphs.append(self._slab(_CAPTURED))

    @property
    def pending(self) -> bool:
        """Whether `fill` has something to do."""
        return bool(self._unfilled)

    def _slab(self, count: int) -> tuple[Tensor, Tensor]:
        # Each begins at a multiple of 16 bytes: a kernel is compiled anew for an address that does not.
        words = 3 * self._layers + (3 * self._layers) % 2
        shape = (count, words)
        host = torch.zeros(shape, dtype=torch.int64, pin_memory=self._pinned)
        device = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return device[:, : 3 * self._layers], host[:, : 3 * self._layers]


def _addresses(kept: Sequence[Tensor | None], top_k: int) -> tuple[int, ...]:
    return (
        *(0 if x is None else x.data_ptr() for x in kept),
        *(0 if x is None else x.stride(0) for x in kept),
        *(0 if x is None else min(top_k, x.shape[1]) for x in kept),
    )
