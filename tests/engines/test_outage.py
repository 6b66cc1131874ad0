"""A collector that stands still under a real engine: rows are dropped, and read back from the KV slots afterwards."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from collector.client import RouteClient
from collector.client.errors import RequestIncomplete
from engine_side.engines.transformers import capture_routes
from protocol.messages import Kind
from tests.engines.running import batching, check_rows, generation
from tests.harness.daemon import running_daemon
from tests.harness.tiny import prompts
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

REQUESTS, NEW_TOKENS = 6, 250
CAP = 6_000
"""Bytes of rows that may wait: a few steps."""


def test_rows_that_a_stopped_collector_cost_are_read_back(model: Any, witness: Any, tmp_path: Path, seed: int) -> None:
    texts = prompts(REQUESTS, seed)
    outputs: dict[str, Any] = {}
    with running_daemon(tmp_path) as daemon:
        with (
            capture_routes(model, daemon.engines, window_cap_bytes=CAP) as capture,
            model.continuous_batching_context_manager(
                generation_config=generation(NEW_TOKENS), continuous_batching_config=batching()
            ) as manager,
        ):
            daemon.process.send_signal(signal.SIGSTOP)
            try:
                for i, text in enumerate(texts):
                    manager.add_request(text, f"request-{i}")
                wait_until(lambda: capture.stats().rows_lost > 0, "rows are lost", 60.0)
            finally:
                daemon.process.send_signal(signal.SIGCONT)
            while len(outputs) < REQUESTS and (output := manager.get_result(timeout=60.0)) is not None:
                outputs[output.request_id] = output
        stats = capture.stats()
        assert stats.errors == 0
        assert 0 < stats.rows_repaired <= stats.rows_lost
        kinds, incomplete = set(), 0
        with RouteClient(daemon.trainers, timeout=30.0) as client:
            for name, output in outputs.items():
                tokens = [*output.prompt_ids, *output.generated_tokens]
                try:
                    routes = client.pull(name, token_ids=tokens)
                except RequestIncomplete:
                    incomplete += 1
                    continue
                kinds |= {kind for _, _, kind in routes.provenance}
                assert check_rows(witness, routes, tokens) == len(tokens) - 1
    print(f"{stats.rows_lost} rows lost, {stats.rows_repaired} repaired, {incomplete} of {REQUESTS} incomplete")
    assert Kind.REPAIR in kinds
    assert incomplete < REQUESTS
