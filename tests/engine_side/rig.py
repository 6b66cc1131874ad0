"""A recorder with a slot store on the device the tests run on, what its rows say, and a place where steps land."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine_side.capture.recorder import RouteRecorder, StepRows
from engine_side.capture.records import Columns, RecordLayout
from engine_side.capture.slot_store import SlotStore
from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.losses import RepairAsk
from protocol.geometry import Geometry

DEVICE = torch.device(os.environ.get("R3_DEVICE", "cpu"))
GEOMETRY = Geometry(5, (1, 3), 2, 8)


@dataclass
class Rig:
    """What an adapter holds, without an engine."""

    layout: RecordLayout
    store: SlotStore
    recorder: RouteRecorder
    kept: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def keep(self, *layers: torch.Tensor | None) -> None:
        """What each captured layer's router chose."""
        self.kept += [(index, ids.to(DEVICE)) for index, ids in enumerate(layers) if ids is not None]

    def commit(self, slots: list[int], start: int = 0, tokens: list[int] | None = None, version: int = 0) -> Columns:
        """One step over `slots`, positions from `start` on, tokens 100 + position unless given."""
        at = range(start, start + len(slots))
        step = self.launch(slots, list(at), tokens or [100 + p for p in at], version)
        return step.columns()

    def report(self) -> None:
        """The routers choose what `keep` says."""
        for index, ids in self.kept:
            self.recorder.keep(index, ids)
        self.kept = []

    def launch(self, slots: list[int], positions: list[int], tokens: list[int], version: int = 0) -> StepRows:
        self.recorder.begin(version)
        self.report()
        return self.recorder.commit(tensor(slots), tensor(positions), tensor(tokens), len(slots))

    def read(self, slots: list[int], tokens: list[int], positions: list[int], max_commit: int) -> Columns:
        asked = torch.tensor([slots, tokens, positions], dtype=torch.int32, device=DEVICE)
        records = torch.zeros((len(slots), self.layout.stride), dtype=torch.uint8, device=DEVICE)
        self.store.read(asked, max_commit, records)
        return self.layout.split(records.cpu().numpy(), len(slots))

    def stored(self, slot: int) -> NDArray[np.int64]:
        """Ids of a slot's row, -1 = uncaptured."""
        row = self.store.rows[slot].cpu().numpy().view(self.layout.dtype).reshape(self.layout.geometry.row_shape)
        return signed(row)

    def number(self, slot: int) -> int:
        """The number of the commit that wrote a slot."""
        return int(self.store.stamps[slot, 0]) >> 8


@dataclass
class Queue:
    """Stands where the shipper does, and keeps what it is handed."""

    landings: list[LandingStep] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    asks: deque[RepairAsk] = field(default_factory=deque)

    def put(self, step: LandingStep) -> None:
        self.landings.append(step)

    def lost(self, plan: StepPlan) -> None:
        self.plans.append(plan)


def rig(geometry: Geometry = GEOMETRY, slots: int = 32, max_tokens: int = 64, narrow: bool | None = None) -> Rig:
    layout = RecordLayout.of(geometry, narrow)
    store = SlotStore(layout, slots, DEVICE)
    return Rig(layout, store, RouteRecorder(layout, max_tokens, DEVICE, store))


def tensor(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def signed(rows: NDArray[np.int16] | NDArray[np.uint8]) -> NDArray[np.int64]:
    """Rows with -1 = uncaptured, whatever their width."""
    wide = rows.astype(np.int64)
    return np.where(wide == 255, -1, wide) if rows.dtype == np.uint8 else wide


def choices(seed: int, tokens: int, width: int = 2, experts: int = 8, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Distinct ids [tokens, width], as a router's top-k gives them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(width, dim=1).indices.to(dtype)
