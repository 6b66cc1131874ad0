"""What was asked about the way from the engine: one queue, each step once, nothing stale, nobody waits."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_side.export.planner import RoutePlanner
from engine_side.shipping.shipper import Shipper
from engine_side.shipping.stream import Barrier, Finish, Lost
from protocol.messages import Flushed, Kind, RequestFinished, RoutedExpertsPatch, RowsLost
from tests.core.driver import Bench
from tests.harness.patches import SMALL
from tests.harness.waiting import wait_until
from tests.seed.chain import Chain, Connected, Run, batch_of, landed
from tests.shipping.landings import decode, landing


@pytest.fixture
def line() -> Connected:
    return Connected(Bench(pages=2_000))


def _rows(bench: Bench, name: str, **more: Any) -> np.ndarray:
    answer = bench.pull(name, **more)
    assert answer.array is not None, answer.problem
    return answer.array[:, list(SMALL.moe_layer_ids)]


def test_question_6_each_row_leaves_the_engine_once_and_a_finish_carries_none(line: Connected) -> None:
    steps = [landing([("1", 0, 40, Kind.FORWARD)], opens=((0, "x"),)), *(decode("1", at) for at in range(40, 80))]
    line.put(*steps, Finish("1", 81, "stop"))
    line.exchange()
    rows = sum(len(step.rows) for step in steps)
    assert sum(len(frames[1]) for message, frames in line.sent if len(frames) > 1) == rows * SMALL.row_nbytes
    (finish,) = (frames for message, frames in line.sent if isinstance(message, RequestFinished))
    assert len(finish) == 1
    assert len(finish[0]) < 32
    assert np.array_equal(_rows(line.bench, "x"), np.concatenate([step.rows for step in steps]))
    assert line.stream.drained, "nothing is held behind the acknowledgement"


def test_question_9_steps_from_before_a_sleep_reach_their_own_lives(line: Connected) -> None:
    """Two steps are still on their way when the engine sleeps; it wakes with other requests in the same batch places,
    under the same names."""
    before = [landing([("1", 0, 4, Kind.FORWARD), ("2", 0, 4, Kind.FORWARD)], opens=((0, "x"), (1, "y")))]
    before.append(landing([("1", 4, 1, Kind.FORWARD), ("2", 4, 1, Kind.FORWARD)], step=2))
    line.put(*before, Finish("1", 6, "stop"), Finish("2", None, "aborted"))
    after = [landing([("3", 0, 4, Kind.FORWARD), ("4", 0, 3, Kind.FORWARD)], step=3, opens=((0, "z"), (1, "y")))]
    after.append(landing([("3", 4, 1, Kind.FORWARD), ("4", 3, 1, Kind.FORWARD)], step=4))
    line.put(*after, Finish("3", 6, "stop"), Finish("4", 5, "stop"))
    line.exchange()
    assert np.array_equal(_rows(line.bench, "x"), np.concatenate([before[0].rows[:4], before[1].rows[:1]]))
    assert np.array_equal(_rows(line.bench, "z"), np.concatenate([after[0].rows[:4], after[1].rows[:1]]))
    assert np.array_equal(_rows(line.bench, "y"), np.concatenate([after[0].rows[4:], after[1].rows[1:]]))


def test_question_10_one_queue_is_the_whole_order(line: Connected, seed: int) -> None:
    """Steps, losses, finishes and barriers go out in the order they were put in, numbered without a hole."""
    chance = random.Random(seed)
    expected: list[tuple[type, object]] = []
    line.put(decode("1", 0, opens=((0, "x"),)))
    line.exchange()
    for at in range(1, 200):
        step = decode("1", at)
        item, said = chance.choice(
            [
                (step, (RoutedExpertsPatch, at)),
                (Lost(step.plan), (RowsLost, at)),
                (Finish(f"{at}", None, "aborted"), (RequestFinished, f"{at}")),
                (Barrier(f"{at}", at), (Flushed, f"{at}")),
            ]
        )
        line.put(item)  # type: ignore[arg-type]
        expected.append(said)
    sent = line.exchange()
    assert [message.seq for message in sent] == list(range(1, 200))  # type: ignore[union-attr]
    assert [(type(message), _mark(message)) for message in sent] == expected


def _mark(message: Any) -> object:
    if isinstance(message, RoutedExpertsPatch):
        return message.step
    return int(np.frombuffer(message.starts, "<i4")[0]) if isinstance(message, RowsLost) else message.req_id


def test_question_11_two_emitters_of_one_process_share_nothing() -> None:
    """Two engines in one process, the same life ids and step numbers, taking turns: each keeps its own rows."""
    bench = Bench(pages=2_000)
    lines, planners = [Connected(bench, "a"), Connected(bench, "b")], [RoutePlanner(), RoutePlanner()]
    steps: list[list[Any]] = [[], []]
    for at in range(20):
        for i in range(2):
            runs = [Run("1", at, [at], at + 1, opens=f"x{i}" if at == 0 else None)]
            plan = planners[i].plan(batch_of(runs), 0)
            step = landed(plan, [at], [at], decode("1", at, rng=np.random.default_rng(100 * i + at)).rows)
            steps[i].append(step)
            lines[i].put(step)
            lines[i].exchange()
    for i, line in enumerate(lines):
        line.put(Finish("1", 21, "stop"))
        line.exchange()
        assert planners[i].step == 20
        assert np.array_equal(_rows(bench, f"x{i}"), np.concatenate([step.rows for step in steps[i]]))


def test_open_drain_pending_copies_memory_is_given_back_only_after_it_was_read(line: Connected) -> None:
    """The copy lands late, and whoever gets the memory next writes it at once."""
    story: list[str] = []
    step = landing([("1", 0, 5, Kind.FORWARD)], opens=((0, "x"),))
    rows = step.rows.copy()
    step.rows[:] = 0

    def wait() -> None:
        story.append("wait")
        step.rows[:] = rows

    def free() -> None:
        story.append("free")
        for column in (step.rows, step.token_ids, step.positions, step.status):
            column[:] = 1

    line.put(replace(step, wait=wait, free=free), Finish("1", 6, "stop"))
    assert not story
    line.exchange()
    assert story == ["wait", "free"]
    assert np.array_equal(_rows(line.bench, "x"), rows)


def test_testplan_attach_once_every_step_is_shipped_once_also_one_without_output(seed: int) -> None:
    """Three chunks of which two yield no token, decode steps, and a last step behind which the engine is idle."""
    line, chain = Connected(Bench(pages=2_000)), Chain(seed)
    tokens = chain.tokens(95)
    runs = [Run("1", 0, tokens[:30], 90, "x"), Run("1", 30, tokens[30:60], 90), Run("1", 60, tokens[60:90], 90)]
    runs += [Run("1", at, tokens[at : at + 1], at + 1) for at in range(90, 95)]
    rows = []
    for run in runs:
        plan = chain.planner.plan(batch_of([run]), 0)
        rows.append(chain.rows(len(run.tokens)))
        line.put(landed(plan, range(run.start, run.start + len(run.tokens)), run.tokens, rows[-1]))
        line.exchange()
    steps = Counter(message.step for message, _ in line.sent if isinstance(message, RoutedExpertsPatch))
    assert steps == Counter(range(1, 9))
    assert line.stream.drained, "the last step needs no step behind it"
    line.put(Finish("1", 96, "length"))
    line.exchange()
    assert np.array_equal(_rows(line.bench, "x", tokens=tokens), np.concatenate(rows))


def test_review_decode_loop_blocking_only_the_shippers_thread_waits_for_a_copy(tmp_path: Path) -> None:
    """Copies that do not land until the engine has put a hundred steps: it must not be the engine that waits."""
    landed_now = threading.Event()
    waited: set[str] = set()

    def wait() -> None:
        assert landed_now.wait(30)
        waited.add(threading.current_thread().name)

    shipper = Shipper(f"ipc://{tmp_path}/nobody.sock", SMALL, "engine")
    shipper.start()
    for at in range(100):
        shipper.put(decode("1", at, wait=wait, opens=((0, "x"),) if at == 0 else ()))
    assert not waited
    landed_now.set()
    wait_until(lambda: shipper.stats().patches == 100, "every step is in the window")
    assert waited == {"r3-shipper"}
    shipper.close(0.0)
