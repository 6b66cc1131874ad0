"""One `ContinuousBatchProcessor` under capture: its steps, finishes, cancellations and block copies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from engine_side.capture.records import RecordLayout
from engine_side.capture.streams import OnStream
from engine_side.engines.transformers.batch import Surveyor
from engine_side.engines.transformers.compat import PagedSlots, batches_launched, forget_graphs
from engine_side.engines.transformers.lives import Lives
from engine_side.engines.transformers.stats import CaptureStats
from engine_side.engines.transformers.wrapping import replaced
from engine_side.export.pipeline import CapturePipeline
from engine_side.shipping.shipper import Shipper
from protocol.messages import FinishReason

log = logging.getLogger("r3.capture")


class ProcessorCapture:
    """Installs itself on `processor`, which is all that keeps it alive; `close` undoes it."""

    def __init__(
        self,
        processor: Any,
        layout: RecordLayout,
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
        self._shipper = shipper
        self._counts = counts
        self._slots = PagedSlots(processor.cache)
        self._surveyor = Surveyor(lives, self._slots, counts)
        self.stream = OnStream(processor.inputs_and_outputs.compute_stream)
        self.pipeline = CapturePipeline(
            layout,
            shipper,
            max_tokens=processor.cache.max_batch_tokens,
            num_slots=self._slots.num_slots,
            device=torch.device(processor.model_device),
        )
        # Graphs that exist already commit nothing: they are captured anew, with the commit in them.
        forget_graphs(processor.inputs_and_outputs)
        self._installed = ExitStack()
        try:
            self._wrap(self._installed)
        except BaseException:
            self._installed.close()
            raise

    def close(self) -> None:
        """Undo what was wrapped. Lives that have not ended are lost with the shipper's goodbye. The device memory goes
        with the processor, or with `free`: graphs that commit may still be replayed."""
        self._installed.close()
        self.pipeline.drain()
        self.processor.r3_pipeline = self.pipeline

    @staticmethod
    def free(processor: Any) -> None:
        """Let go of the device memory of a processor whose capture is closed, and of the graphs that commit into it."""
        pipeline = vars(processor).pop("r3_pipeline", None)
        if pipeline is not None:
            forget_graphs(processor.inputs_and_outputs)
            pipeline.free()

    def forget(self) -> None:
        """What ran until now was nobody's request: nothing of it is ever read."""
        self.pipeline.idle()
        self.pipeline.recorder.unreported.clear()
        if self.pipeline.store is not None:
            self.pipeline.store.stamp_uncaptured(slice(None))
        if hasattr(self.processor.inputs_and_outputs, "io_pairs"):
            self.processor.inputs_and_outputs.current_pair = 0

    # ------------------------------------------------------------------ what is wrapped

    def _wrap(self, installed: ExitStack) -> None:
        processor = self.processor
        step, cancelled = processor._generation_step, processor.scheduler.clear_cancelled_requests
        compute = processor.model_runner.compute_batch
        router = processor.output_router
        deliver_batch, fail_and_deliver = router.deliver_batch, router.fail_and_deliver

        def generation_step(model: Any) -> None:
            self._safely(self._before_step)
            step(model)
            self._safely(self._after_step)

        def compute_batch(model: Any, inputs: dict[str, Any]) -> None:
            # Steps, and the engine's own warm-up: both capture graphs. What the forward of another thread, on the same
            # model, chooses is not this one's.
            self._forward.capture = self
            try:
                compute(model, inputs)
            finally:
                self._forward.capture = None

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
            (processor.model_runner, "compute_batch", compute_batch),
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

    def keep(self, index: int, topk_ids: Tensor) -> None:
        """A router of this processor's forward chose."""
        self.pipeline.recorder.keep(index, topk_ids)

    def keep_copy(self, index: int, topk_ids: Tensor) -> None:
        """A router of this processor's compiled forward chose."""
        self.pipeline.recorder.keep_copy(index, topk_ids)

    def commit(self, inputs: Mapping[str, Any]) -> None:
        """The model's forward is over: commit it. inputs: its keyword arguments. For a graph, once, at capture."""
        self._safely(self._commit, inputs)

    def _commit(self, inputs: Mapping[str, Any]) -> None:
        self.pipeline.commit(self._slots.on_device(inputs), inputs["position_ids"][0], inputs["input_ids"][0])

    def _before_step(self) -> None:
        with self.stream:
            self.pipeline.begin(self._weight_version())

    def _after_step(self) -> None:
        # On the engine's own stream: what it launches next comes behind this, on the device, without the host.
        with self.stream:
            found = self._surveyor.survey(batches_launched(self.processor.inputs_and_outputs))
            if not found.num_tokens:
                return
            self.pipeline.end(found.scheduled, found.hits)
        counts, cached = self._counts, sum(found.hits.counts)
        counts.steps += 1
        counts.rows += found.num_tokens + cached
        counts.forward_rows += found.num_tokens
        counts.cached_rows += cached
        counts.forked_rows += found.forked_rows

    def _copied(self, source: Sequence[int], target: Sequence[int]) -> None:
        with self.stream:
            self.pipeline.copied(self._slots.of_blocks(source), self._slots.of_blocks(target))

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
            self._shipper.lost(self.pipeline.planner.cached(life.life_id, 0, 1, life.name))

    def _end(self, request_id: str, num_tokens: int | None, reason: FinishReason, detail: str = "") -> None:
        life = self.lives.end(request_id)
        if life is not None and life.doubled:
            self._shipper.finish(life.life_id, None, "failed", "its id was used again while it ran")
        elif life is not None:
            self._shipper.finish(life.life_id, num_tokens, reason, detail)
