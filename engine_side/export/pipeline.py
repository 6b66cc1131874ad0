"""One emitter's path from a forward to the shipper: what every engine's adapter drives, whatever its scheduler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_side.capture.errors import CaptureError
from engine_side.capture.recorder import RouteRecorder, StepRows
from engine_side.capture.records import RecordLayout
from engine_side.capture.slot_store import SlotStore
from engine_side.export.exporter import StepExporter
from engine_side.export.plan import StepPlan
from engine_side.export.planner import DecodeBatch, RoutePlanner, ScheduledBatch
from engine_side.shipping.losses import RepairAsk
from engine_side.shipping.shipper import Shipper

log = logging.getLogger("r3.capture")


@dataclass(slots=True)
class PrefixHits:
    """Rows that some other forward computed, one entry a request. slots, tokens: int32 arrays over all entries' rows,
    in the entries' order."""

    lives: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    slots: list[NDArray[np.int32]] = field(default_factory=list)
    tokens: list[NDArray[np.int32]] = field(default_factory=list)


class CapturePipeline:
    """Recorder, slot store, planner and exporter of one KV cache: made when it is made, freed when it is freed.

    The engine's thread calls `begin` before a forward and `end` behind it, both on the stream the forward runs on. In
    between, routers `keep` and the end of the model's forward commits, or a captured graph does both.
    """

    def __init__(
        self,
        layout: RecordLayout,
        shipper: Shipper,
        *,
        max_tokens: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.planner = RoutePlanner()
        self.steps = 0
        self.lost_steps = 0
        self._shipper = shipper
        self._exporter = StepExporter(layout, device)
        self.store: SlotStore | None = SlotStore(layout, num_slots, device)
        self.recorder = RouteRecorder(layout, max_tokens, device, self.store)
        self._device = device
        self._version = 0
        self.failed: CaptureError | None = None
        """Why the forward since the last `begin` or `idle` could not be committed."""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device: the store, the step's rows, prefix rows on their way."""
        store = 0 if self.store is None else self.store.nbytes
        return store + self.recorder.nbytes + self._exporter.nbytes

    # ------------------------------------------------------------------ a step

    def begin(self, weight_version: int) -> None:
        """Number the forward that is launched next. Its rows carry `weight_version`."""
        self._version = weight_version
        self.failed = None
        self._exporter.before_commit()
        self.recorder.begin(weight_version)
        self._shipper.quiet = False

    def idle(self) -> None:
        """Forwards from here on belong to no step, until the next `begin`: a dummy batch, a warm-up."""
        self.failed = None
        self._exporter.before_commit()
        self.recorder.idle()

    def commit(self, slots: Tensor, positions: Tensor, input_ids: Tensor) -> StepRows | None:
        """Commit what the routers kept: at the end of the target model's forward, before any drafter's. Never raises
        into the engine's forward: a step that cannot be committed is lost at its `end`."""
        try:
            return self.recorder.commit(slots, positions, input_ids, len(positions))
        except CaptureError as error:
            self.failed = error
        except Exception as error:
            log.exception("a commit failed: its step is lost")
            self.failed = CaptureError(f"the commit failed: {type(error).__name__}: {error}")
            if self.store is not None:
                # The KV of these slots is new, their rows are an older occupant's: nothing may read them as proven.
                self.store.stamp_uncaptured(slots.to(torch.int64))
        return None

    def end(self, batch: ScheduledBatch | DecodeBatch, hits: PrefixHits | None = None) -> None:
        """Ship the step begun last. Raises CaptureError when it could not be committed, PinnedFull when it could not be
        taken over: its rows are declared lost then, and the engine goes on."""
        left = [self.planner.plan(batch, self._version)]
        if hits is not None and hits.lives:
            left += self.planner.prefix_hits(hits.lives, hits.starts, hits.counts, self._exporter.rows_per_chunk)
        self._shipper.quiet = True
        try:
            self._put_step(left[0])
            del left[0]
            if hits is not None and left:
                self._put_prefix(hits, left)
        except Exception:
            for plan in left:
                self.lost_steps += 1
                self._shipper.lost(plan)
            raise
        if self._shipper.asks:
            self._repair(self._shipper.asks.popleft())

    def _put_step(self, plan: StepPlan) -> None:
        total = int(plan.offsets[-1])
        if self.failed is not None:
            raise self.failed
        if total > self.recorder.max_tokens:
            raise CaptureError(f"the step has {total} tokens, the rows of a forward only {self.recorder.max_tokens}")
        self._shipper.put(self._exporter.export(plan, self.recorder.rows(total)))
        self.steps += 1

    def _put_prefix(self, hits: PrefixHits, plans: list[StepPlan]) -> None:
        """Rows that some other forward computed, read behind this step's commit, in bounded chunks: takes the plans
        that it has put out of `plans`."""
        assert self.store is not None
        slots, tokens = np.concatenate(hits.slots), np.concatenate(hits.tokens)
        counts = np.asarray(hits.counts)
        # Position of every row: its entry's start plus its place in the entry.
        shift = np.asarray(hits.starts) - (np.cumsum(counts) - counts)
        positions = np.arange(len(slots)) + np.repeat(shift, counts)
        asked = np.stack([slots, tokens, positions]).astype(np.int32)
        at = 0
        while plans:
            count = int(plans[0].offsets[-1])
            part = np.ascontiguousarray(asked[:, at : at + count])
            self._shipper.put(self._exporter.read(plans[0], self.store, part, self.recorder.commit_no))
            at += count
            del plans[0]

    def _repair(self, ask: RepairAsk) -> None:
        """Read rows back that the shipper had to drop, behind this step's commit. What cannot be read stays lost."""
        plan = self.planner.repair(ask.lives, ask.starts, ask.counts)
        try:
            if self.store is None or ask.origin is not self._exporter:
                raise CaptureError("their slots are gone")
            self._shipper.put(self._exporter.read(plan, self.store, ask.asked, self.recorder.commit_no, ask.proof))
        except Exception as error:
            log.warning("%d dropped rows cannot be read back: %s", ask.asked.shape[1], error)
            self._shipper.lost(plan)

    # ------------------------------------------------------------------ blocks and ends

    def copied(self, source: Sequence[int] | NDArray[np.int64], target: Sequence[int] | NDArray[np.int64]) -> None:
        """The engine copied KV slots `source` to `target`, on the current stream: their rows go along."""
        if self.store is not None and len(source):
            both = torch.from_numpy(np.stack([source, target]).astype(np.int64)).to(self._device, non_blocking=True)
            self.store.copy(both[0], both[1])

    def drain(self) -> None:
        """Wait until what is on its way has landed."""
        self._exporter.drain()

    def free(self) -> None:
        """Let go of the device, once no graph that commits can be replayed any more: what is on its way lands first,
        and nothing of before crosses into what comes after."""
        self.drain()
        self._exporter.drop()
        self.recorder.drop()
        self.recorder.store = None
        self.store = None
