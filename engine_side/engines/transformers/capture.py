"""Capture around a model's continuous batching: everything it installs sits on instances and is removed at the end."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from engine_side.capture import compiled
from engine_side.capture.errors import CaptureError, CaptureRefused, EngineRunning
from engine_side.capture.hooks import find_routers, geometry_of, hooked
from engine_side.capture.records import RecordLayout
from engine_side.engines.transformers.canary import accompany, prove
from engine_side.engines.transformers.compat import (
    engine_facts,
    refuse_engine,
    refuse_model,
    tensor_rank,
)
from engine_side.engines.transformers.declared import DeclaredBytes, declaring
from engine_side.engines.transformers.lives import Lives, Names
from engine_side.engines.transformers.processor import ProcessorCapture
from engine_side.engines.transformers.stats import CaptureStats
from engine_side.engines.transformers.wrapping import replaced
from engine_side.shipping.shipper import Shipper, ShipperStats
from protocol.limits import MAX_WEIGHT_VERSION

_SLOTS, _PAGES = 0, 1
"""What a compiled forward hands its commit: indices that it wrote, or the page table of the decode path."""


class RouteCapture:
    """One model's capture. Enter it, run the model, leave it: see `capture_routes`."""

    enabled = True

    def __init__(
        self,
        model: Any,
        collector: str,
        engine_id: str | None,
        drain_s: float,
        window_cap_bytes: int,
        on_full: Literal["drop", "wait"],
        wait_s: float,
        keys: Path | str | None = None,
    ) -> None:
        if "init_continuous_batching" in vars(model):
            raise CaptureRefused("this model is being captured already: leave the other block first")
        self._model = model
        refuse_model(model)
        self._routers = find_routers(model)
        self.geometry = geometry_of(model, self._routers)
        self._layout = RecordLayout.of(self.geometry)
        if (cached := getattr(model, "_cached_continuous_batching_manager", None)) is not None:
            refuse_engine(cached.continuous_batching_config, cached.distributed_helper.tp_size)
        # Ranks that a model is spread over see the same tokens and choose alike: one of them ships.
        self.ships = tensor_rank(model) == 0
        self._weight_version = 0
        name = engine_id or f"{socket.gethostname()}-{os.getpid()}"
        self._shipper = (
            Shipper(
                collector,
                self.geometry,
                name,
                window_cap_bytes=window_cap_bytes,
                on_full=on_full,
                wait_s=wait_s,
                keys=keys,
            )
            if self.ships
            else None
        )
        self._drain_s = drain_s
        self._installed = ExitStack()
        self._processors: list[weakref.ref[ProcessorCapture]] = []
        self._stopped: list[weakref.ref[Any]] = []
        self._proven: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counts = CaptureStats()
        self._managers: list[weakref.ref[Any]] = []
        self._names = Names()
        self._serial = itertools.count(1)
        self._forward = threading.local()
        self._handle = compiled.register(self)
        self._token = torch.zeros(1, device=model.device)
        self._closed = False
        self._lock = threading.Lock()
        self.drained = False
        self.refused: CaptureRefused | None = None
        """Why the engine was not let through at its start: a way it executes does not report every layer."""

    @property
    def _running(self) -> ProcessorCapture | None:
        """Whose forward this thread runs; None: somebody else's, on the same model."""
        found: ProcessorCapture | None = getattr(self._forward, "capture", None)
        return found

    def _keep(self, index: int, ids: Any) -> None:
        if (running := self._running) is not None:
            running.keep(index, ids)

    def _commit(self, _model: Any, _args: Any, inputs: dict[str, Any], _output: Any) -> None:
        if torch.compiler.is_compiling():
            table = inputs.get("block_table")
            where = [table] if table is not None else list(inputs["write_index"])
            tensors = [inputs["position_ids"], inputs["input_ids"], *where]
            compiled.commit(tensors, self._token, self._handle, _PAGES if table is not None else _SLOTS)
        elif (running := self._running) is not None:
            running.commit(inputs)

    def keep_compiled(self, index: int, ids: Tensor) -> None:
        """A router chose, in compiled code."""
        if (running := self._running) is not None:
            running.keep_copy(index, ids)

    def commit_compiled(self, inputs: list[Tensor], layout: int) -> None:
        """A compiled forward is over."""
        positions, tokens, *where = inputs
        if (running := self._running) is not None:
            slots = {"block_table": where[0]} if layout == _PAGES else {"write_index": where}
            running.commit({"position_ids": positions, "input_ids": tokens, **slots})

    def __enter__(self) -> Self:
        try:
            return self._enter()
        except BaseException:
            self._drain_s = 0.0
            self.__exit__(None, None, None)
            raise

    def _enter(self) -> Self:
        cached = getattr(self._model, "_cached_continuous_batching_manager", None)
        if self.ships:
            keep = compiled.keeper(self._handle, self._token, self._keep)
            self._installed.enter_context(hooked(self._routers, keep, self.geometry))
            self._installed.callback(self._model.register_forward_hook(self._commit, with_kwargs=True).remove)
        make_manager = self._model.init_continuous_batching

        def init_continuous_batching(*args: Any, **kwargs: Any) -> Any:
            before = self._model.config._attn_implementation
            manager = make_manager(*args, **kwargs)
            try:
                self._watch(manager)
            except BaseException:
                if self._model.config._attn_implementation != before:
                    self._model.set_attn_implementation(before)
                raise
            return manager

        self._installed.enter_context(replaced(self._model, "init_continuous_batching", init_continuous_batching))
        if cached is not None:
            self._watch(cached)
        if self._shipper is not None:
            self._shipper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._lock:
                self._closed = True
                self._installed.close()
                for manager in self._managers:
                    if (known := manager()) is not None:
                        vars(known).pop("_create_batch_processor", None)
                        vars(known).pop("stop", None)
            for processor in self._processors:
                if (alive := processor()) is not None:
                    alive.close()
        finally:
            self.drained = self._shipper is None or self._shipper.close(self._drain_s)
        if self.refused is not None and error is None:
            # It was raised where the engine starts, in a thread of its own that fails its requests and logs.
            raise self.refused

    def client_id(self, request_id: str) -> str:
        """The name that routes of the engine's `request_id` are collected under: differs for siblings only."""
        return self._names.of(request_id)

    def set_weight_version(self, version: int) -> None:
        """Stamp rows of forwards launched from now on. Call it when new weights are in place."""
        if not 0 <= version <= MAX_WEIGHT_VERSION:
            raise CaptureError(f"a weight version is in [0, {MAX_WEIGHT_VERSION}], got {version}")
        self._weight_version = version

    def sleep(self) -> None:
        """Let go of all device memory that capture holds, and of every cache of this block's engines: to give the
        device to a trainer. Stop the engines first, or this raises EngineRunning and leaves all as it is.

        Copies on their way to the host land before that; the shipper goes on with them meanwhile. A manager that was
        kept for the next session loses its cache, whose rows are here. Nothing has to be called to wake up: the next
        engine makes a cache and a store of its own, whose bytes are declared and whose ways of executing are proven
        again. No row of before is in it. Call `set_weight_version` before, where weights changed.
        """
        with self._lock:
            managers = [each for reference in self._managers if (each := reference()) is not None]
            if any(manager.is_running() for manager in managers):
                raise EngineRunning("an engine of this block is running: stop its manager, then sleep")
            for manager in managers:
                self._let_go(manager.batch_processor)
                manager.batch_processor = None
                manager.warmed_up = False
            self._free_stopped()
        _collect()

    def stats(self) -> CaptureStats:
        """Counters of this block, the shipper's included."""
        return self._counts.with_shipper(ShipperStats() if self._shipper is None else self._shipper.stats())

    def _watch(self, manager: Any) -> None:
        """Wrap the manager so that its batch processor is captured from its first step."""
        if "_create_batch_processor" in vars(manager):
            return
        refuse_engine(manager.continuous_batching_config, manager.distributed_helper.tp_size)
        make_processor = manager._create_batch_processor

        def create() -> Any:
            config = manager.continuous_batching_config
            declared = DeclaredBytes.of(self._layout, engine_facts(config, 1).compiled)
            with declaring(declared, config):
                processor = make_processor()
            with self._lock:
                if not self._closed and processor not in self._proven:
                    self._begin(processor, manager.distributed_helper)
            return processor

        stop = manager.stop

        def stop_and_let_go(*args: Any, **kwargs: Any) -> None:
            processor = manager.batch_processor
            stop(*args, **kwargs)
            if manager.batch_processor is None and not manager.is_running():
                self._let_go(processor)
                # The engine gave memory back to the device while capture still held its processor.
                del processor
                _collect()

        manager._create_batch_processor = create
        manager.stop = stop_and_let_go
        # Weakly: a KV cache must not outlive its manager because it was captured.
        self._managers = [each for each in self._managers if each() is not None]
        self._managers.append(weakref.ref(manager))
        running = getattr(manager, "batch_processor", None)
        if running is not None:
            self._begin(running, manager.distributed_helper)

    def _begin(self, processor: Any, ranks: Any) -> None:
        """Capture a processor, or, on a rank that does not ship, keep step with the one that does."""
        try:
            with _agreed(ranks):
                captured = self._capture(processor)
            try:
                with _agreed(ranks):
                    if captured is not None:
                        prove(captured, self._model)
                    else:
                        accompany(processor, self._model)
            except BaseException:
                if captured is not None:
                    captured.close()
                raise
        except CaptureRefused as error:
            self.refused = error
            raise
        self._proven.add(processor)
        if captured is not None:
            self._processors = [each for each in self._processors if each() is not None]
            self._processors.append(weakref.ref(captured))

    def _capture(self, processor: Any) -> ProcessorCapture | None:
        if self._shipper is None:
            return None
        return ProcessorCapture(
            processor,
            self._layout,
            lambda: self._weight_version,
            self._shipper,
            self._counts,
            Lives(self._serial, self._names),
            self._forward,
        )

    def _let_go(self, processor: Any) -> None:
        """An engine that stopped for good takes its cache along: its manager's output router must not hold it."""
        captured = [each for reference in self._processors if (each := reference()) is not None]
        for each in captured:
            if each.processor is processor:
                each.close()
        self._processors = [weakref.ref(each) for each in captured if each.processor is not processor]
        # Somebody may hold it: what it keeps on the device waits for `sleep`.
        self._stopped = [each for each in self._stopped if each() is not None]
        self._stopped += [weakref.ref(processor)] if processor is not None else []

    def _free_stopped(self) -> None:
        for reference in self._stopped:
            if (processor := reference()) is not None:
                ProcessorCapture.free(processor)
        self._stopped = []


@contextmanager
def _agreed(ranks: Any) -> Iterator[None]:
    """What rank 0 raises in the block, every rank raises behind it: none goes on to a collective that another never
    reaches. ranks: the engine's DistributedHelper."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    said = ranks.tp_broadcast_object_from_rank_0(None if error is None else (str(error), getattr(error, "keys", ())))
    if error is not None:
        raise error
    if said is not None:
        raise CaptureRefused(*said)


def _collect() -> None:
    """Have what nobody holds any more leave the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
