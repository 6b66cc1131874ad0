"""One `ContinuousBatchProcessor` under capture: its steps, finishes, cancellations and block copies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from engine_side.capture.recorder import RouteRecorder
from engine_side.capture.slot_store import SlotStore
from engine_side.engines.transformers.compat import PagedSlots
from engine_side.engines.transformers.lives import Life, Lives
from engine_side.engines.transformers.stats import CaptureStats
from engine_side.engines.transformers.wrapping import replaced
from engine_side.export.exporter import StepExporter
from engine_side.export.plan import StepPlan
from engine_side.export.planner import RoutePlanner, ScheduledBatch
from engine_side.shipping.shipper import Shipper
from protocol.messages import FinishReason

log = logging.getLogger("r3.capture")


class ProcessorCapture:
    """Installs itself on `processor`, which is all that keeps it alive; `close` undoes it."""

    def __init__(
        self,
        processor: Any,
        recorder: RouteRecorder,
        shipper: Shipper,
        counts: CaptureStats,
        lives: Lives,
        forward: threading.local,
    ) -> None:
        self.processor = processor
        self.lives = lives
        self._forward = forward
        self._versions = recorder
        self._recorder = RouteRecorder(recorder.geometry)
        self._shipper = shipper
        self._counts = counts
        self._device = torch.device(processor.model_device)
        self._slots = PagedSlots(processor.cache)
        self._store: SlotStore | None = SlotStore(recorder.geometry, self._slots.num_slots, self._device)
        self._planner = RoutePlanner()
        self._exporter = StepExporter(recorder.geometry, self._device)
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
            self._recorder.weight_version = self._versions.weight_version
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
            log.exception("capture failed in %s; the rows of this step are lost", action.__name__)

    # ------------------------------------------------------------------ a step

    def _after_step(self) -> None:
        io = self.processor.inputs_and_outputs
        # A parent whose last prompt token waits for the fork stands in the batch with no token.
        for future in io.requests_in_batch:
            self.lives.of(future.state)  # names its children before the fork
        batch = [future for future in io.requests_in_batch if future.query_length]
        if not batch:
            return
        lives = [self.lives.of(future.state) for future in batch]
        counts = [future.query_length for future in batch]
        starts = [f.state.position_offset - n for f, n in zip(batch, counts, strict=True)]
        total = sum(counts)
        opens, hits = [], []
        for i, (life, start) in enumerate(zip(lives, starts, strict=True)):
            if start < life.next:
                self._counts.preemptions += 1
                life.next = 0
            if start > life.next:
                hits.append((life, batch[i].state, life.next, start))
            if not life.opened:
                life.opened = True
                opens.append((i, life.name))
            life.next = start + counts[i]
            self._counts.chunked_prefills += not batch[i].has_new_token
        accepted = [len(f.state.initial_tokens) + len(f.state.generated_tokens) for f in batch]
        scheduled = ScheduledBatch([life.life_id for life in lives], starts, counts, accepted, opens)
        plan = self._planner.plan(scheduled, self._recorder.weight_version)
        self._counts.steps += 1
        slots = None
        try:
            slots = torch.from_numpy(
                np.concatenate(
                    [
                        self._slots.of(f.state.request_id, start, start + n)
                        for f, start, n in zip(batch, starts, counts, strict=True)
                    ]
                )
            ).to(self._device)
            rows = self._recorder.commit(
                slots,
                io.position_ids.reshape(-1)[:total],
                io.input_ids.reshape(-1)[:total],
                total,
            )
            self._shipper.put(self._exporter.export(plan, rows))
        except Exception:
            self._shipper.lost(plan)
            # The KV of these slots is new, their rows are an older occupant's: nothing may read them as proven.
            assert self._recorder.store is not None
            self._recorder.store.stamp_uncaptured(slots if slots is not None else slice(None))
            raise
        self._counts.rows += total
        self._counts.forward_rows += total
        for life, state, start, stop in hits:
            self._read_prefix(life, state, start, stop, rows.commit_no)

    def _read_prefix(self, life: Life, state: Any, start: int, stop: int, max_commit: int) -> None:
        """Rows [start, stop) that some other forward computed, read after this step's commit, in bounded chunks."""
        assert self._store is not None
        tokens = (state.initial_tokens + state.generated_tokens)[start:stop]
        slots = self._slots.of(state.request_id, start, stop)
        for at in range(0, stop - start, self._exporter.rows_per_chunk):
            part = slice(at, min(at + self._exporter.rows_per_chunk, stop - start))
            first, count = start + part.start, part.stop - part.start
            found = self._store.read(
                torch.from_numpy(slots[part]).to(self._device),
                torch.tensor(tokens[part], dtype=torch.int32, device=self._device),
                torch.arange(first, first + count, dtype=torch.int32, device=self._device),
                max_commit,
            )
            plan: StepPlan = self._planner.cached(life.life_id, first, count, None)
            try:
                self._shipper.put(self._exporter.export(plan, found))
            except Exception:
                self._shipper.lost(plan)
                raise
        self._counts.rows += stop - start
        self._counts.cached_rows += stop - start
        if life.forked and start == 0:
            self._counts.forked_rows += stop - start
            life.forked = False

    def _copied(self, source: Sequence[int], target: Sequence[int]) -> None:
        if source and self._store is not None:
            at, to = self._slots.of_blocks(source), self._slots.of_blocks(target)
            self._store.copy(torch.from_numpy(at).to(self._device), torch.from_numpy(to).to(self._device))

    # ------------------------------------------------------------------ ends

    def _delivered(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.is_finished() and self.lives.find(output.request_id) is not None:
                count = len(output.prompt_ids) + len(output.generated_tokens)
                self._counts.finished += 1
                self._end(output.request_id, count, "stop")

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
