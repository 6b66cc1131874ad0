"""`r3-collector serve`."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from collector.core.config import CoreConfig
from collector.daemon.config import DaemonConfig, default_state, parse_bytes
from collector.daemon.server import Daemon
from collector.endpoints import engines_endpoint, trainers_endpoint


def serve(
    engines: Annotated[str, typer.Option(help="Endpoint engines ship to: ipc://PATH or tcp://127.0.0.1:PORT.")] = "",
    trainers: Annotated[str, typer.Option(help="Endpoint trainers and this CLI ask.")] = "",
    keys: Annotated[
        Path | None,
        typer.Option(
            help="The collector's folder of `keygen`: every peer must prove who it is; other hosts may come in."
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="Row memory.")] = "2GiB",
    ttl: Annotated[float, typer.Option(help="Seconds a settled request is kept unless released.", min=1.0)] = 3600.0,
    liveness: Annotated[float, typer.Option(help="Seconds of silence after which an engine is dead.", min=0.5)] = 30.0,
    window: Annotated[str, typer.Option(help="Bytes an engine may have unacknowledged.")] = "64MiB",
    state: Annotated[
        str,
        typer.Option(
            help="Directory for rows and log, which survive kill -9; `memory`: nothing does. "
            "Default: one in /dev/shm, or in /var/tmp where that is too small."
        ),
    ] = "",
    fsync: Annotated[bool, typer.Option("--fsync", help="Survive a power loss, too: every burst waits.")] = False,
    checkpoint_records: Annotated[int, typer.Option(hidden=True, min=1)] = 50_000,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
) -> None:
    """Run the collector until SIGTERM or SIGINT, then drain and leave.

    Example: r3-collector serve --engines ipc:///run/r3/engines.sock --trainers tcp://127.0.0.1:5757 --budget 8GiB
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    core = CoreConfig(ttl_s=ttl, liveness_s=liveness, window_bytes=parse_bytes(window))
    engines, trainers, size = engines or engines_endpoint(), trainers or trainers_endpoint(), parse_bytes(budget)
    folder = Path(state) if state else default_state(engines, trainers, size)
    daemon = Daemon(
        DaemonConfig(
            engines=engines,
            trainers=trainers,
            keys=keys,
            budget=size,
            state=None if state == "memory" else folder,
            fsync=fsync,
            checkpoint_records=checkpoint_records,
            core=core,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.stop())
    daemon.on_ready = lambda: typer.echo(
        f"r3-collector ready engines={daemon.engines_endpoint} trainers={daemon.trainers_endpoint} budget={budget} "
        f"state={daemon.config.state or 'memory'}"
    )
    daemon.run()
    # It has drained: a second signal while the interpreter winds up must not turn a clean exit into a death.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
