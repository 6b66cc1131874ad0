"""Capture around a model's continuous batching: everything it installs sits on instances and is removed at the end."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from engine_side.capture.errors import CaptureRefused
from engine_side.capture.hooks import find_routers, geometry_of, hooked
from engine_side.capture.recorder import RouteRecorder
from engine_side.engines.transformers.compat import refuse_unsupported, require_supported
from engine_side.engines.transformers.processor import ProcessorCapture
from engine_side.engines.transformers.stats import CaptureStats
from engine_side.engines.transformers.wrapping import replaced
from engine_side.shipping.shipper import Shipper


class RouteCapture:
    """One model's capture. Enter it, run the model, leave it: see `capture_routes`."""

    enabled = True

    def __init__(self, model: Any, collector: str, engine_id: str, window_cap_bytes: int, drain_s: float) -> None:
        require_supported()
        if "init_continuous_batching" in vars(model):
            raise CaptureRefused("this model is being captured already: leave the other block first")
        self._model = model
        self._routers = find_routers(model)
        self.geometry = geometry_of(model, self._routers)
        self._recorder = RouteRecorder(self.geometry)
        name = engine_id or f"{socket.gethostname()}-{os.getpid()}"
        self._shipper = Shipper(collector, self.geometry, name, window_cap_bytes=window_cap_bytes)
        self._drain_s = drain_s
        self._installed = ExitStack()
        self._processors: list[ProcessorCapture] = []
        self._counts = CaptureStats()
        self.drained = False

    def __enter__(self) -> Self:
        cached = getattr(self._model, "_cached_continuous_batching_manager", None)
        self._installed.enter_context(hooked(self._routers, self._recorder.keep))
        make_manager = self._model.init_continuous_batching

        def init_continuous_batching(*args: Any, **kwargs: Any) -> Any:
            manager = make_manager(*args, **kwargs)
            self._watch(manager)
            return manager

        self._installed.enter_context(replaced(self._model, "init_continuous_batching", init_continuous_batching))
        if cached is not None:
            self._watch(cached)
        self._shipper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._installed.close()
        for processor in self._processors:
            processor.close()
        self.drained = self._shipper.close(self._drain_s)

    def client_id(self, request_id: str) -> str:
        """The name that routes of the engine's `request_id` are collected under: differs for siblings only."""
        for processor in reversed(self._processors):
            name = processor.lives.client_id(request_id)
            if name != request_id:
                return name
        return request_id

    def set_weight_version(self, version: int) -> None:
        """Stamp rows of forwards launched from now on. Call it when new weights are in place."""
        self._recorder.weight_version = version

    def stats(self) -> CaptureStats:
        """Counters of this block, the shipper's included."""
        return self._counts.with_shipper(self._shipper.stats())

    def _watch(self, manager: Any) -> None:
        """Wrap the manager so that its batch processor is captured from its first step."""
        if "_create_batch_processor" in vars(manager):
            return
        refuse_unsupported(manager.continuous_batching_config)
        make_processor = manager._create_batch_processor

        def create() -> Any:
            processor = make_processor()
            if all(watched.processor is not processor for watched in self._processors):
                self._processors.append(
                    ProcessorCapture(processor, self._recorder, self._shipper, self._counts, self._installed)
                )
            return processor

        self._installed.enter_context(replaced(manager, "_create_batch_processor", create))
        running = getattr(manager, "batch_processor", None)
        if running is not None:
            self._processors.append(
                ProcessorCapture(running, self._recorder, self._shipper, self._counts, self._installed)
            )
