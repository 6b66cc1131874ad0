"""The trainer's process: takes tokens on stdin, pulls their routes, compares, replays. Figures as JSON on stdout."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from collector.client import RouteClient, Routes
from collector.client.errors import RequestAborted
from collector.replay import r3_verify, replay_routes
from deploy.demo.figures import Progress, Rollout, TrainerReport
from protocol.messages import Kind
from tests.engines.ties import RESOLUTION, worst_shortfall
from tests.harness.tiny import load_tiny
from tests.harness.witness import differing_rows, logprobs, prefill_routes


@dataclass
class _Sums:
    """What accumulates over the requests. Log-probabilities in nats, of generated tokens."""

    rows: int = 0
    rows_compared: int = 0
    rows_wrong: int = 0
    rows_tied: int = 0
    rows_missing: int = 0
    rows_cached: int = 0
    rows_replayed: int = 0
    rows_installed: int = 0
    cells: int = 0
    cells_differing: int = 0
    complete: int = 0
    aborted: int = 0
    bytes_pulled: int = 0
    pull_seconds: float = 0.0
    engine: list[NDArray[Any]] = field(default_factory=list)
    native: list[NDArray[Any]] = field(default_factory=list)
    replayed: list[NDArray[Any]] = field(default_factory=list)


def main() -> None:
    """Read rollouts until stdin ends."""
    ask = argparse.ArgumentParser()
    ask.add_argument("--collector", required=True)
    ask.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    args = ask.parse_args()
    torch.set_num_threads(1)
    model = load_tiny(torch.float32)
    sums = _Sums()
    with RouteClient(args.collector, timeout=60.0) as client:
        for line in sys.stdin.buffer:
            rollout = msgspec.json.decode(line, type=Rollout)
            routes = _pull(client, rollout, sums)
            _compare(model, rollout, routes, sums)
            if not rollout.cancelled:
                _replay(model, rollout, routes, sums)
            client.release(rollout.request_id)
            _say(Progress(rollout.request_id))
    _say(_report(sums))


def _pull(client: RouteClient, rollout: Rollout, sums: _Sums) -> Routes:
    started = time.perf_counter()
    tokens = rollout.tokens
    try:
        # A cancelled request's exact length is the engine's to say.
        routes = client.pull(rollout.request_id, token_ids=None if rollout.cancelled else tokens)
        sums.complete += 1
    except RequestAborted as aborted:
        if not rollout.cancelled or aborted.routes is None:
            raise
        routes = aborted.routes
        sums.aborted += 1
    sums.pull_seconds += time.perf_counter() - started
    sums.bytes_pulled += routes.array.nbytes
    return routes


def _compare(model: Any, rollout: Rollout, routes: Routes, sums: _Sums) -> None:
    """Row by row against an independent prefill of the same tokens, as sets per layer."""
    served = len(routes.array)
    expected = prefill_routes(model, rollout.tokens[: served + 1])
    sums.rows += served
    sums.rows_compared += len(expected)
    sums.rows_missing += sum(b - a for a, b in routes.missing)
    sums.rows_cached += sum(b - a for a, b, kind in routes.provenance if kind == Kind.CACHED)
    cells = differing_rows(routes.array[: len(expected)], expected)
    differ = len(set(cells[:, 0].tolist()))
    # Float32 cannot decide every choice the same way in every batch shape (1 row in 20,000): a request whose choices
    # all are best ones up to rounding, given those before them, is right.
    if differ and worst_shortfall(model, rollout.tokens[: served + 1], routes.array) < RESOLUTION:
        sums.rows_tied += differ
    else:
        sums.rows_wrong += differ
    sums.cells += len(expected) * len(routes.moe_layer_ids)
    sums.cells_differing += len(cells)


def _replay(model: Any, rollout: Rollout, routes: Routes, sums: _Sums) -> None:
    """The trainer's own log-probabilities of the generated tokens, replay off and on."""
    start = rollout.prompt_tokens - 1
    ids = torch.tensor([rollout.tokens])
    with replay_routes(model, routes) as report, torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    chosen = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    sums.rows_replayed += report.rows_replayed
    sums.rows_installed += len(routes.array)
    sums.engine.append(np.asarray(rollout.logprobs))
    sums.native.append(logprobs(model, rollout.tokens)[start:])
    sums.replayed.append(chosen[start:])


def _report(sums: _Sums) -> TrainerReport:
    engine, native, on = (np.concatenate(x) for x in (sums.engine, sums.native, sums.replayed))
    mask = np.ones(len(engine), np.bool_)
    counts = {name: value for name, value in vars(sums).items() if isinstance(value, int)}
    return TrainerReport(
        counts=counts,
        pull_seconds=sums.pull_seconds,
        off=msgspec.to_builtins(r3_verify(engine, native, mask)),
        on=msgspec.to_builtins(r3_verify(engine, on, mask)),
    )


def _say(message: Progress | TrainerReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
