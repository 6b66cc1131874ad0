"""The daemon in a Ray actor's process. Rows go over ZeroMQ as always; Ray carries the endpoints."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from collector.client import RouteClient
from collector.core.config import CoreConfig
from collector.daemon.config import DaemonConfig
from collector.daemon.errors import StartError
from collector.daemon.server import Daemon

_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where engines ship to and where trainers pull from."""

    engines: str
    trainers: str


class _Hosted:
    """A daemon on a thread of this process."""

    def __init__(self, config: DaemonConfig) -> None:
        self._daemon = Daemon(config)
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._daemon.on_ready = self._ready.set
        self._thread = threading.Thread(target=self._run, name="r3-collector", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_S) or self._error is not None:
            raise StartError(f"the collector did not start: {self._error or f'no answer in {_START_S:g} s'}")
        self.endpoints = Endpoints(self._daemon.engines_endpoint, self._daemon.trainers_endpoint)

    def _run(self) -> None:
        try:
            self._daemon.run()
        except BaseException as error:
            self._error = error
            self._ready.set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> bool:
        """Drain and end. True when the thread ended in time."""
        self._daemon.stop()
        self._thread.join(_START_S)
        return not self._thread.is_alive()


class RouteCollector:
    """What `RouteCollectorActor` runs; a plain class, so that it can be used and tested without Ray.

    engines, trainers: endpoints (default: ipc paths in a fresh private directory of this node; a trainer on another
    node cannot reach those). keys: the folder that `r3-collector keygen` made, with `collector` and `trainer` in it, on
    this node; other nodes are let in only with it. budget: bytes of row memory. ttl_s, liveness_s: see `CoreConfig`.
    """

    def __init__(
        self,
        engines: str = "",
        trainers: str = "",
        budget: int = 2 << 30,
        ttl_s: float = 3600.0,
        liveness_s: float = 30.0,
        keys: str = "",
    ) -> None:
        base = Path(tempfile.mkdtemp(prefix="r3-collector-"))
        core = replace(CoreConfig(), ttl_s=ttl_s, liveness_s=liveness_s)
        self._trainer_keys = Path(keys) / "trainer" if keys else None
        self._hosted = _Hosted(
            DaemonConfig(
                engines=engines or f"ipc://{base}/engines.sock",
                trainers=trainers or f"ipc://{base}/trainers.sock",
                keys=Path(keys) / "collector" if keys else None,
                budget=budget,
                core=core,
            )
        )

    def endpoints(self) -> Endpoints:
        """Where engines ship to and where trainers pull from."""
        return self._hosted.endpoints

    def healthy(self) -> bool:
        """Whether the daemon's loop is alive and answers."""
        return self._hosted.alive and bool(self.stats())

    def stats(self) -> dict[str, float]:
        """The daemon's counters and gauges."""
        with RouteClient(self._hosted.endpoints.trainers, timeout=5.0, keys=self._trainer_keys) as client:
            return client.stats()

    def release(self, request_ids: Sequence[str]) -> int:
        """Release requests, as a trainer does at the end of a step. Returns how many were known."""
        with RouteClient(self._hosted.endpoints.trainers, timeout=30.0, keys=self._trainer_keys) as client:
            return client.release(request_ids)

    def stop(self) -> bool:
        """Drain and end the daemon. True when it ended in time."""
        return self._hosted.stop()


RouteCollectorActor = ray.remote(num_cpus=0)(RouteCollector)
"""`RouteCollectorActor.remote(budget=…)`; then `ray.get(actor.endpoints.remote())`."""
