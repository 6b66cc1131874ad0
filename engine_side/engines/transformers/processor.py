"""One `ContinuousBatchProcessor` under capture: its steps, finishes, cancellations and block copies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_side.capture.recorder import RouteRecorder
from engine_side.capture.slot_store import SlotStore, StepRows, StoredRows
from engine_side.engines.transformers.batch import PrefixHits, survey
from engine_side.engines.transformers.compat import PagedSlots
from engine_side.engines.transformers.lives import Lives
from engine_side.engines.transformers.stats import CaptureStats
from engine_side.engines.transformers.streams import on_stream
from engine_side.engines.transformers.wrapping import replaced
from engine_side.export.exporter import StepExporter
from engine_side.export.plan import StepPlan
from engine_side.export.planner import RoutePlanner
from engine_side.shipping.shipper import Shipper
from protocol.geometry import Geometry
from protocol.messages import FinishReason

log = logging.getLogger("r3.capture")


class ProcessorCapture:
    """Installs itself on `processor`, which is all that keeps it alive; `close` undoes it."""

    def __init__(
        self,
        processor: Any,
        geometry: Geometry,
        weight_version: Callable[[], int],
        shipper: Shipper,
        counts: CaptureStats,
        lives: Lives,
        forward: threading.local,
    ) -> None:
        self.processor = processor
        self.lives = lives
        self._forward = forward
        self._weight_version = weight_version
        self._recorder = RouteRecorder(geometry)
        self._shipper = shipper
        self._counts = counts
        self._device = torch.device(processor.model_device)
        self._slots = PagedSlots(processor.cache)
        self._store: SlotStore | None = SlotStore(geometry, self._slots.num_slots, self._device)
        self._planner = RoutePlanner()
        self._exporter = StepExporter(geometry, self._device)
        self._installed = ExitStack()
        try:
            self._wrap(self._installed)
        except BaseException:
            self._installed.close()
            raise

    def close(self) -> None:
        """Undo what was wrapped, free the slot store. Lives that have not ended are lost with the shipper's goodbye."""
        self._installed.close()
        self._store = None

    # ------------------------------------------------------------------ what is wrapped

    def _wrap(self, installed: ExitStack) -> None:
        processor = self.processor
        step, cancelled = processor._generation_step, processor.scheduler.clear_cancelled_requests
        router = processor.output_router
        deliver_batch, fail_and_deliver = router.deliver_batch, router.fail_and_deliver

        def generation_step(model: Any) -> None:
            # What the forward of another thread, on the same model, chooses is not this step's.
            self._recorder.drop()
            self._recorder.store = self._store
            self._recorder.weight_version = self._weight_version()
            self._forward.recorder = self._recorder
            try:
                step(model)
            finally:
                self._forward.recorder = None
            self._safely(self._after_step)

        def clear_cancelled_requests() -> Any:
            states = cancelled()
            self._safely(self._cancelled, states)
            return states

        def deliver(outputs: list[Any]) -> None:
            self._safely(self._delivered, outputs)
            deliver_batch(outputs)

        def fail(state: Any, error: Exception) -> None:
            self._safely(self._failed, state, error)
            fail_and_deliver(state, error)

        copy_name, copy = self._slots.wrap_copies(processor.cache, lambda a, b: self._safely(self._copied, a, b))
        for owner, name, function in (
            (processor, "_generation_step", generation_step),
            (processor.scheduler, "clear_cancelled_requests", clear_cancelled_requests),
            (router, "deliver_batch", deliver),
            (router, "fail_and_deliver", fail),
            (processor.cache, copy_name, copy),
        ):
            installed.enter_context(replaced(owner, name, function))

    def _safely(self, action: Any, *args: Any) -> None:
        """An exception here would end the engine's generation thread: capture fails, the engine goes on."""
        try:
            action(*args)
        except Exception:
            self._counts.errors += 1
            if self._counts.errors == 1:
                log.exception("capture failed in %s: rows are lost; further failures are only counted", action.__name__)

    # ------------------------------------------------------------------ a step

    def _after_step(self) -> None:
        store = self._store
        if store is None:
            return
        io = self.processor.inputs_and_outputs
        plan: StepPlan | None = None
        slots: Tensor | slice = slice(None)
        # On the engine's own stream: the memory of what the routers returned goes back to that stream's next forward.
        with on_stream(io.compute_stream):
            try:
                found = survey(io.requests_in_batch, self.lives, self._slots, self._counts)
                total = found.num_tokens
                if not total:
                    return
                plan = self._planner.plan(found.scheduled, self._recorder.weight_version)
                slots = self._on_device(found.slots, torch.int64)
                positions, token_ids = io.position_ids.reshape(-1)[:total], io.input_ids.reshape(-1)[:total]
                rows = self._recorder.commit(slots, positions, token_ids, total)
            except Exception:
                if plan is not None:
                    self._shipper.lost(plan)
                # The KV of these slots is new, their rows are an older occupant's: nothing may read them as proven.
                store.stamp_uncaptured(slots)
                raise
            self._counts.steps += 1
            self._put(plan, rows)
            self._counts.rows += total
            self._counts.forward_rows += total
            self._read_hits(store, found.hits, rows.commit_no)

    def _read_hits(self, store: SlotStore, hits: PrefixHits, max_commit: int) -> None:
        """Rows that some other forward computed, read after this step's commit, in bounded chunks."""
        at = 0
        for plan in self._planner.prefix_hits(hits.lives, hits.starts, hits.counts, self._exporter.rows_per_chunk):
            count = int(plan.offsets[-1])
            spans = zip(plan.starts.tolist(), np.diff(plan.offsets).tolist(), strict=True)
            rows = store.read(
                self._on_device(hits.slots[at : at + count], torch.int64),
                self._on_device(hits.tokens[at : at + count], torch.int32),
                self._on_device([p for start, n in spans for p in range(start, start + n)], torch.int32),
                max_commit,
            )
            self._put(plan, rows)
            at += count
        self._counts.rows += at
        self._counts.cached_rows += at
        self._counts.forked_rows += hits.forked_rows

    def _put(self, plan: StepPlan, rows: StepRows | StoredRows) -> None:
        try:
            landing = self._exporter.export(plan, rows)
        except Exception:
            self._shipper.lost(plan)
            raise
        self._shipper.put(landing)

    def _copied(self, source: Sequence[int], target: Sequence[int]) -> None:
        if source and self._store is not None:
            at, to = self._slots.of_blocks(source), self._slots.of_blocks(target)
            with on_stream(self.processor.inputs_and_outputs.compute_stream):
                self._store.copy(self._on_device(at, torch.int64), self._on_device(to, torch.int64))

    def _on_device(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    # ------------------------------------------------------------------ ends

    def _delivered(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.is_finished() and (life := self.lives.find(output.request_id)) is not None:
                count = len(output.prompt_ids) + len(output.generated_tokens)
                self._counts.finished += 1
                stopped = not life.state._eos_token_ids.isdisjoint(output.generated_tokens[-1:])
                self._end(output.request_id, count, "stop" if stopped else "length")

    def _cancelled(self, states: Sequence[Any]) -> None:
        for state in states:
            self._counts.cancelled += 1
            self._open_if_new(state)
            self._end(state.request_id, len(state.initial_tokens) + len(state.generated_tokens), "aborted")

    def _failed(self, state: Any, error: Exception) -> None:
        self._counts.failed += 1
        self._open_if_new(state)
        self._end(state.request_id, None, "failed", f"{type(error).__name__}: {error}"[:200])

    def _open_if_new(self, state: Any) -> None:
        """A request that ends before any forward still has a story: it opens with its first row declared lost."""
        life = self.lives.of(state)
        if not life.opened:
            life.opened = True
            self._shipper.lost(self._planner.cached(life.life_id, 0, 1, life.name))

    def _end(self, request_id: str, num_tokens: int | None, reason: FinishReason, detail: str = "") -> None:
        life = self.lives.end(request_id)
        if life is not None and life.doubled:
            self._shipper.finish(life.life_id, None, "failed", "its id was used again while it ran")
        elif life is not None:
            self._shipper.finish(life.life_id, num_tokens, reason, detail)
