"""What is installed: the routes of a batch, laid out as the routers will see its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from collector.replay.checks import ModelGeometry, RoutesLike, checked_rows, name_of
from collector.replay.errors import LayoutError
from collector.replay.layout import Layout


class ReplayPlan:
    """Rows of one batch: `[flat rows, top_k]` per layer, kept as int16 and copied once to each device that asks.

    rows_missing, rows_last, rows_padding: flat rows without a route, by reason; rows_replayed: the others.
    """

    def __init__(self, routes: Sequence[RoutesLike], layout: Layout, model: ModelGeometry) -> None:
        if len(routes) != len(layout.positions):
            raise LayoutError("requests", expected=f"{len(layout.positions)} in the layout", found=len(routes))
        self.layout = layout
        self.model = model
        self.names = tuple(name_of(each, index) for index, each in enumerate(routes))
        ids = np.zeros((len(model.moe_layer_ids), layout.num_rows, model.top_k), dtype=np.int16)
        routed = np.zeros(layout.num_rows, dtype=np.bool_)
        self.rows_missing = 0
        for each, name, positions in zip(routes, self.names, layout.positions, strict=True):
            rows, holds = checked_rows(each, name, len(positions), model)
            ids[:, positions[:-1]] = rows.transpose(1, 0, 2)
            routed[positions[:-1]] = holds
            self.rows_missing += int(np.count_nonzero(~holds))
        self.rows_replayed = int(np.count_nonzero(routed))
        self.rows_last = len(routes)
        self.rows_padding = layout.num_rows - sum(len(positions) for positions in layout.positions)
        self._index = {layer: index for index, layer in enumerate(model.moe_layer_ids)}
        self._ids = torch.from_numpy(ids)
        self._routed = torch.from_numpy(routed)
        self._copies: dict[tuple[int, torch.device], torch.Tensor] = {}

    @property
    def all_routed(self) -> bool:
        """Whether no flat row is left to the native router."""
        return self.rows_replayed == self.layout.num_rows

    def ids(self, layer: int, device: torch.device) -> torch.Tensor:
        """int64 `[flat rows, top_k]`, fresh memory; meaningless where `routed` is False."""
        return self._on(self._index[layer], self._ids[self._index[layer]], device).long()

    def routed(self, device: torch.device) -> torch.Tensor:
        """bool `[flat rows]`: which rows have a route."""
        return self._on(-1, self._routed, device)

    def whose(self, flat_row: int) -> tuple[str, int]:
        """Request and row (token index) of a flat row that has a route."""
        for name, positions in zip(self.names, self.layout.positions, strict=True):
            found = np.flatnonzero(positions == flat_row)
            if len(found):
                return name, int(found[0])
        raise LookupError(f"flat row {flat_row} is padding")

    def _on(self, key: int, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if (key, device) not in self._copies:
            self._copies[key, device] = tensor.to(device)
        return self._copies[key, device]
