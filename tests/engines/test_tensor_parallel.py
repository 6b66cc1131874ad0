"""An engine spread over two processes: rank 0 captures and ships, rank 1 holds nothing, their block counts agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from collector.client import RouteClient
from engine_side.capture.records import RecordLayout
from engine_side.capture.slot_store import SlotStore
from protocol.geometry import Geometry
from tests.engines.running import cached_rows, check_rows
from tests.harness.daemon import RunningDaemon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

DEADLINE_S = 90.0
ROOT = Path(__file__).resolve().parents[2]
OLD = transformers.__version__.startswith("5.17.")


def run_ranks(collector: str, folder: Path, seed: int, case: str) -> list[dict[str, Any]]:
    """What each of two ranks said. Neither outlives the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    command = [sys.executable, "-m", "tests.engines.tensor_ranks", collector, str(folder / "meet"), str(seed), case]
    ranks = []
    try:
        for rank in ("0", "1"):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            with (folder / f"out-{rank}").open("w") as out, (folder / f"err-{rank}").open("w") as err:
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=out, stderr=err))
        codes = [each.wait(deadline - time.monotonic()) for each in ranks]
    except subprocess.TimeoutExpired:
        codes = [each.poll() for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait(20)
    errors = "\n".join((folder / f"err-{rank}").read_text()[-2000:] for rank in range(2))
    assert codes == [0, 0], errors
    return [json.loads((folder / f"out-{rank}").read_text().splitlines()[-1]) for rank in range(2)]


def check_ranks(witness: Any, collector: RunningDaemon, ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert "refused" not in first, first["refused"]
    assert "refused" not in second, second["refused"]
    # Both ran the same and chose alike, the proof at the start included.
    assert first["tokens"] == second["tokens"]
    assert first["digest"] == second["digest"]
    # Each left the same room for rows, by itself.
    assert first["sizes"] == second["sizes"]
    assert first["blocks"] == second["blocks"] > 0
    # Routers and the model itself: one hook each, on rank 0 alone.
    assert (first["hooks"], second["hooks"]) == (7, 0)
    layout = RecordLayout.of(Geometry(8, tuple(range(1, 7)), 4, 32))
    assert first["stores"] == [SlotStore.declared_bytes(layout, (first["blocks"] + 2) * 32)]
    assert (second["stores"], second["shippers"]) == ([], [])
    assert first["shippers"] == ["r3-shipper"]
    assert first["drained"]
    assert second["drained"]
    assert first["stats"]["errors"] == 0
    assert first["stats"]["finished"] == len(first["tokens"]) == 8
    assert not any(second["stats"].values())
    with RouteClient(collector.trainers, timeout=30.0) as client:
        hits = 0
        for name, tokens in first["tokens"].items():
            routes = client.pull(name, token_ids=tokens)
            assert routes.engine_id == "rank-0"
            assert check_rows(witness, routes, tokens) == len(tokens) - 1
            hits += cached_rows(routes)
        assert hits == first["stats"]["cached_rows"] > 0
        assert {entry.request_id for entry in client.requests(limit=1000).entries} >= set(first["tokens"])


def test_question_5_ranks_other_than_0_hold_no_store(
    witness: Any, collector: RunningDaemon, tmp_path: Path, seed: int
) -> None:
    check_ranks(witness, collector, run_ranks(collector.engines, tmp_path, seed, "tensor"))


def test_experts_spread_over_ranks_show_logical_ids_or_are_refused(
    witness: Any, collector: RunningDaemon, tmp_path: Path, seed: int
) -> None:
    ranks = run_ranks(collector.engines, tmp_path, seed + 1, "experts")
    if OLD:
        # Its routers return numbers of the rank's own experts, and one that is none for all others.
        assert [each["keys"] for each in ranks] == [["physical_experts"]] * 2
    else:
        check_ranks(witness, collector, ranks)


def test_what_rank_0_refuses_no_rank_runs(collector: RunningDaemon, tmp_path: Path, seed: int) -> None:
    ranks = run_ranks(collector.engines, tmp_path, seed, "silent")
    assert ["layer 3 did not report" in each["refused"] for each in ranks] == [True, True]
