"""From a commit to host memory: prefix reads in bounded plans, pinned buffers within a budget, columns that agree."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from engine_side.capture.records import RecordLayout
from engine_side.export.exporter import CHUNK_BYTES, StepExporter
from engine_side.export.pinned import Pinned, PinnedFull, PinnedPool
from engine_side.export.planner import RoutePlanner, ScheduledBatch
from protocol.geometry import Geometry
from protocol.messages import Kind

GEOMETRY = Geometry(5, (1, 3), 2, 8)
CPU = torch.device("cpu")


def test_prefix_hits_cover_each_row_once_in_order_and_in_bounded_plans(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(300):
        n, room = chance.randint(0, 9), chance.randint(1, 40)
        lives = [f"life-{i}" for i in range(n)]
        starts = [chance.randint(0, 50) for _ in range(n)]
        counts = [chance.randint(1, 90) for _ in range(n)]
        plans = list(RoutePlanner().prefix_hits(lives, starts, counts, room))
        found = [
            (plan.req_ids[i], int(plan.starts[i]) + k)
            for plan in plans
            for i in range(len(plan.req_ids))
            for k in range(int(plan.offsets[i + 1] - plan.offsets[i]))
        ]
        assert found == [(x, s + k) for x, s, c in zip(lives, starts, counts, strict=True) for k in range(c)]
        sizes = [int(plan.offsets[-1]) for plan in plans]
        assert all(size == room for size in sizes[:-1])
        assert all(1 <= size <= room for size in sizes)
        assert [plan.step for plan in plans] == list(range(1, len(plans) + 1))
        assert all((plan.kinds == Kind.CACHED).all() and not plan.opens for plan in plans)


def test_an_entry_that_runs_nothing_is_an_error_and_takes_no_step_number() -> None:
    planner = RoutePlanner()
    with pytest.raises(ValueError, match="life b runs no token"):
        planner.plan(ScheduledBatch(["a", "b"], [0, 4], [3, 0], [3, 5], [(1, "client")]), 0)
    assert planner.step == 0


def test_a_chunk_of_prefix_rows_is_bounded_with_all_its_columns() -> None:
    for geometry in (GEOMETRY, Geometry(94, tuple(range(94)), 8, 128)):
        layout = RecordLayout.of(geometry)
        rows = StepExporter(layout, CPU).rows_per_chunk
        row = layout.stride + 12
        assert CHUNK_BYTES - row < rows * row <= CHUNK_BYTES


def test_pinned_buffers_are_reused_within_their_budget() -> None:
    pool = PinnedPool(budget=256 << 10, pin=False)
    taken = [pool.take(60_000) for _ in range(4)]
    assert {len(buffer.array) for buffer in taken} == {64 << 10}
    assert len({buffer.memory.data_ptr() for buffer in taken}) == 4
    with pytest.raises(PinnedFull, match="65536 more"):
        pool.take(1)
    pool.give(taken.pop())
    again = pool.take(64 << 10)
    with pytest.raises(PinnedFull):
        pool.take(1)
    for buffer in (*taken, again):
        pool.give(buffer)
    # What is free, but too small, makes room for what is asked for.
    assert len(pool.take(200_000).array) == 256 << 10
    assert pool.held_bytes == 256 << 10


def test_no_two_steps_on_their_way_share_a_pinned_buffer(seed: int) -> None:
    pool = PinnedPool(budget=1 << 20, pin=False)
    given: list[Pinned] = []
    there = threading.Condition()

    def land() -> None:
        for _ in range(2_000):
            with there:
                assert there.wait_for(lambda: given, 10)
                buffer = given.pop(0)
            mark = buffer.array[0]
            assert (buffer.array[:64] == mark).all()
            pool.give(buffer)

    shipper = threading.Thread(target=land)
    shipper.start()
    chance = random.Random(seed)
    sent = 0
    while sent < 2_000:
        try:
            buffer = pool.take(chance.choice((100, 100_000, 300_000)))
        except PinnedFull:
            continue
        buffer.array[:64] = chance.randint(0, 255)
        with there:
            given.append(buffer)
            there.notify()
        sent += 1
    shipper.join(20)
    assert not shipper.is_alive()
    assert pool.held_bytes <= 1 << 20
