"""The serving benchmark's arithmetic: which steps are timed, in which order runs come, what holds."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import results
from tests.gpu.serving_summary import order, summary
from tests.gpu.steps import GraphCounts, Step, StepClock, counted_graphs


def _run(step_ms: float, on: bool, steps: int = 80) -> dict[str, Any]:
    figures = dict.fromkeys(("tokens_per_s", "ttft_mean_ms", "tpot_mean_ms", "tpot_p99_ms"), 1.0)
    run = {"decode_step_ms": step_ms, "decode_steps": steps, "steps": 90, "steps_replayed": 90, "graph_replays": 90}
    shipped = {"stats": {"rows": 5, "rows_lost": 0, "errors": 0}, "drained": True, "pulled": 6} if on else {}
    return figures | run | shipped


def _ratio(*steps: tuple[float, float], count: int = 80) -> Any:
    pairs = [(_run(off, False, count), _run(on, True, count)) for off, on in steps]
    return next(each for each in summary("x", pairs, True) if each.name == "x/decode-step-ratio")


def test_runs_alternate_so_that_drift_falls_on_both() -> None:
    assert [on for pair in range(3) for on in order(pair)] == [False, True, True, False, False, True]


def test_the_bar_is_half_a_percent_or_the_spread_of_the_same_work() -> None:
    assert _ratio((10.0, 10.04), (10.0, 10.04), (10.0, 10.9)).holds
    assert not _ratio((10.0, 10.1), (10.0, 10.1), (10.0, 10.0)).holds
    assert _ratio((10.0, 10.1), (10.2, 10.3), (10.0, 10.1)).holds
    assert not _ratio((10.0, 10.0), (10.0, 10.0), (10.0, 10.0), count=60).holds, "180 steps are too few"


def test_a_lost_row_does_not_hold() -> None:
    off, on = _run(1.0, False), _run(1.0, True)
    on["stats"]["rows_lost"] = 1
    rows = next(each for each in summary("x", [(off, on)], True) if each.name == "x/rows-lost")
    assert (rows.ours, rows.holds) == (1.0, False)


def test_steps_beside_a_capture_or_a_prefill_are_not_timed() -> None:
    clock = StepClock(GraphCounts(), 4)
    #        prefill, then decode; a capture at 5
    kinds = [(False, 1, 0), *[(True, 1, 0)] * 4, (True, 0, 1), *[(True, 1, 0)] * 4]
    clock.steps = [Step(float(i), decode, replays, captures, 4) for i, (decode, replays, captures) in enumerate(kinds)]
    assert clock.decode_seconds(graphs=True) == [1.0] * 4
    for step in clock.steps:
        object.__setattr__(step, "replays", 0)
    assert clock.decode_seconds(graphs=True) == []


def test_a_step_is_a_full_decode_if_every_request_has_one_token() -> None:
    batch = SimpleNamespace(total_seqlen_q=4, num_request_in_batch=4)
    manager = SimpleNamespace(batch_processor=SimpleNamespace(inputs_and_outputs=batch), _generation_step=lambda: None)
    clock = StepClock(GraphCounts(), 4)
    clock.install(manager)
    for queries, requests in ((4, 4), (4, 3), (7, 4)):
        batch.total_seqlen_q, batch.num_request_in_batch = queries, requests
        manager._generation_step()
    assert [step.decode for step in clock.steps] == [True, False, False]


def test_replays_and_captures_are_counted_and_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = SimpleNamespace(replay=lambda self: "ran", capture_end=lambda self: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    before = kind.replay
    with counted_graphs() as counts:
        kind.replay(None)
        kind.replay(None)
        kind.capture_end(None)
    assert (counts.replays, counts.captures) == (2, 1)
    assert kind.replay is before


def test_results_say_how_they_came_about(tmp_path: Any) -> None:
    results.write(tmp_path / "x.json", "tests.gpu.serving", [{"name": "a"}], notes=["n"])
    found = json.loads((tmp_path / "x.json").read_text())
    assert list(found) == ["command", "date", "card", "versions", "records", "notes"]
    assert found["records"] == [{"name": "a"}]
    assert found["versions"]["torch"] == torch.__version__
