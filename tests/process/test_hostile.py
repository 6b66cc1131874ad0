"""Bad bytes through the real sockets: each a typed answer, the daemon alive, other requests whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from collector.client import RouteClient
from protocol import codec, codes, limits
from protocol.messages import (
    Describe,
    Hello,
    HelloFirst,
    List,
    Problem,
    Pull,
    Refused,
    Release,
    RequestFinished,
)
from tests.harness.daemon import RunningDaemon, running_daemon
from tests.harness.patches import SMALL, WIDE, Seg, frames, random_rows
from tests.process.raw import raw_engine, raw_peer

GROWTH = 150 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path_factory.mktemp("r3")) as running:
        yield running


@pytest.fixture(autouse=True)
def _others_stay_whole(daemon: RunningDaemon, seed: int, request: pytest.FixtureRequest) -> Iterator[None]:
    """A request is half shipped before the attack and finished after it: it must come out as it went in."""
    name = request.node.name
    rng = np.random.default_rng(seed)
    rows, tokens = random_rows(rng, SMALL, 20), tuple(range(20))
    before = daemon.rss_bytes()
    with raw_engine(daemon.engines, SMALL, f"honest {name}"[:500]) as engine:
        engine.send(*frames(SMALL, 0, [Seg("1", 0, rows[:12], tokens[:12], opens=name[:500])]))
        yield
        engine.send(*frames(SMALL, 1, [Seg("1", 12, rows[12:], tokens[12:])]))
        engine.say(RequestFinished(2, "1", 21, "stop"))
        engine.await_ack(2)
        with RouteClient(daemon.trainers, timeout=10.0) as client:
            routes = client.pull(name[:500], token_ids=[*tokens, 0])
            assert np.array_equal(routes.array[:, list(SMALL.moe_layer_ids)], rows)
            client.release(name[:500])
    assert daemon.process.poll() is None
    assert daemon.rss_bytes() - before < GROWTH


def _good(seq: int = 0) -> list[bytes]:
    rows = np.tile(np.arange(2, dtype=np.int16), (3, 2, 1))
    return frames(SMALL, seq, [Seg("9", 0, rows, (1, 2, 3), opens="victim")])


def _packed(value: Any) -> bytes:
    return bytes([limits.VERSION]) + msgspec.msgpack.encode(value)


BOMB = bytes([limits.VERSION]) + b"\x91" * 100_000

HEADERS: dict[str, tuple[str, Callable[[], list[bytes]]]] = {
    "empty": ("version", lambda: [b""]),
    "unknown version": ("version", lambda: [b"\x07" + _good()[0][1:], *_good()[1:]]),
    "truncated": ("header", lambda: [_good()[0][:-3], *_good()[1:]]),
    "random": ("header", lambda: [bytes([limits.VERSION, *range(200, 255)])]),
    "nested bomb": ("header", lambda: [BOMB]),
    "a map": ("header", lambda: [_packed({"seq": 1})]),
    "unknown tag": ("header", lambda: [_packed([99, 1, 2])]),
    "huge integer": ("header", lambda: [_packed([6, 2**64 - 1, [[]]]) + b"\x01"]),
    "a million names": ("header", lambda: [_packed([2, ["x"] * 1_000_000])]),
    "oversized": ("oversized", lambda: [bytes([limits.VERSION]) + bytes(limits.MAX_HEADER_BYTES + 1)]),
    "two frames": ("frames", lambda: _good()[:2]),
    "five frames": ("frames", lambda: [*_good(), b"", b""]),
    "a trainer's message": ("header", lambda: [codec.encode(Pull(1, "x"))]),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_header_is_refused_and_its_number_is_not_used(daemon: RunningDaemon, case: str) -> None:
    reason, make = HEADERS[case]
    with raw_engine(daemon.engines, SMALL, f"attacker {case}") as attacker:
        attacker.send(*make())
        answer = attacker.from_collector()
        assert isinstance(answer, Refused)
        assert answer.code == reason
        attacker.send(*_good(0))
        attacker.await_ack(0)
    with RouteClient(daemon.trainers, timeout=0.0) as client:
        assert client.release("victim") == 1


PATCHES: dict[str, tuple[str, Callable[[], list[bytes]]]] = {
    "rows too short": ("rows", lambda: [_good()[0], _good()[1][:-1], _good()[2]]),
    "rows of another dtype": ("rows", lambda: [_good()[0], _good()[1] * 2, _good()[2]]),
    "ids out of range": ("rows", lambda: [_good()[0], bytes([200]) * len(_good()[1]), _good()[2]]),
    "no rows": ("rows", lambda: [_good()[0], b"", _good()[2]]),
    "tokens too short": ("columns", lambda: [_good()[0], _good()[1], _good()[2][:-4]]),
    "negative start": ("columns", lambda: frames(SMALL, 0, _segs(), starts=np.array([-5], "<i4").tobytes())),
    "start beyond every context": (
        "columns",
        lambda: frames(SMALL, 0, _segs(), starts=np.array([limits.MAX_TOKENS], "<i4").tobytes()),
    ),
    "offsets that descend": ("columns", lambda: frames(SMALL, 0, _segs(), offsets=np.array([3, 0], "<i4").tobytes())),
    "kind out of range": ("columns", lambda: frames(SMALL, 0, _segs(), kinds=b"\x09")),
    "ids that do not decode": ("columns", lambda: frames(SMALL, 0, _segs(), req_ids=b"\xff\xff")),
    "an id too long": (
        "columns",
        lambda: frames(SMALL, 0, _segs(), req_ids=codec.encode_ids(["x" * (limits.MAX_ID_CHARS + 1)])),
    ),
    "ids for other segments": ("columns", lambda: frames(SMALL, 0, _segs(), req_ids=codec.encode_ids(["a", "b"]))),
    "opens a segment that is not there": ("columns", lambda: frames(SMALL, 0, _segs(), opens=((7, "x"),))),
    "bad rows beyond the rows": (
        "columns",
        lambda: frames(SMALL, 0, _segs(), bad_rows=np.array([99], "<i4").tobytes()),
    ),
    "a step of another geometry": ("rows", lambda: frames(WIDE, 0, [_wide()])),
}


def _segs() -> list[Seg]:
    return [Seg("9", 0, np.tile(np.arange(2, dtype=np.int16), (3, 2, 1)), (1, 2, 3), opens="victim")]


def _wide() -> Seg:
    return Seg("9", 0, np.tile(np.arange(3, dtype=np.int16), (2, 3, 1)), (1, 2), opens="victim")


@pytest.mark.parametrize("case", PATCHES)
def test_bad_patch_is_refused_and_takes_its_number(daemon: RunningDaemon, case: str) -> None:
    reason, make = PATCHES[case]
    with raw_engine(daemon.engines, SMALL, f"attacker {case}") as attacker:
        attacker.send(*make())
        answer = attacker.from_collector()
        assert isinstance(answer, Refused)
        assert (answer.code, answer.seq) == (reason, 0)
        attacker.say(RequestFinished(1, "9", 4, "stop"))
        attacker.await_ack(1)
    with RouteClient(daemon.trainers, timeout=0.0) as client:
        # Whatever of it was readable is at most incomplete: a refused patch acts as a loss.
        assert all(life.state in ("incomplete", "lost") for life in client.describe("victim"))
        client.release("victim")


def test_rows_before_hello_are_asked_to_introduce_themselves(daemon: RunningDaemon) -> None:
    with raw_peer(daemon.engines) as stranger:
        stranger.send(*_good())
        assert isinstance(stranger.from_collector(), HelloFirst)


def test_impossible_geometry_is_refused(daemon: RunningDaemon) -> None:
    with raw_peer(daemon.engines) as stranger:
        for field, value in (("top_k", 9), ("num_experts", 0), ("moe_layer_ids", ()), ("num_layers", 1)):
            stranger.say(Hello("e", "i", msgspec.structs.replace(SMALL, **{field: value}), 0))
            answer = stranger.from_collector()
            assert isinstance(answer, Refused)
            assert answer.code == "hello"


def test_trainer_socket_answers_nonsense_with_a_problem(daemon: RunningDaemon) -> None:
    with raw_peer(daemon.trainers) as trainer:
        for sent, reason in (
            ([b""], "version"),
            ([b"\x09abc"], "version"),
            ([BOMB], "header"),
            ([codec.encode(Pull(1, "x")), b"more"], "frames"),
            ([bytes([limits.VERSION]) + bytes(limits.MAX_HEADER_BYTES + 1)], "oversized"),
            (_good(), "header"),
        ):
            trainer.send(*sent)
            answer = trainer.to_trainer()
            assert isinstance(answer, Problem)
            assert (answer.nonce, answer.code) == (0, reason)


ASKS: dict[str, tuple[str, Any]] = {
    "unknown id": (codes.UNKNOWN, Pull(5, "nobody")),
    "empty id": (codes.BAD_REQUEST, Pull(5, "")),
    "id too long": (codes.BAD_REQUEST, Pull(5, "x" * 10_000)),
    "no tokens": (codes.BAD_REQUEST, Pull(5, "x", num_tokens=0)),
    "more tokens than exist": (codes.BAD_REQUEST, Pull(5, "x", num_tokens=2**62)),
    "negative wait": (codes.BAD_REQUEST, Pull(5, "x", timeout_ms=-1)),
    "too many releases": (codes.TOO_MANY, Release(5, tuple("ab" * 40_000))),
}


@pytest.mark.parametrize("case", ASKS)
def test_absurd_asks_get_a_typed_problem(daemon: RunningDaemon, case: str) -> None:
    code, ask = ASKS[case]
    with raw_peer(daemon.trainers) as trainer:
        trainer.say(ask)
        answer = trainer.to_trainer()
        assert isinstance(answer, Problem)
        assert (answer.nonce, answer.code) == (5, code)


SLICES: dict[str, dict[str, Any]] = {
    "rows beyond the end": {"rows": (0, 10**9)},
    "rows backwards": {"rows": (5, 2)},
    "negative rows": {"rows": (-4, 2)},
    "a layer that is not there": {"layers": (0, 99)},
    "a negative layer": {"layers": (-1,)},
    "a million layers": {"layers": (1,) * 1_000_000},
    "a dtype that cannot say uncaptured": {"dtype": "uint8"},
}


@pytest.mark.parametrize("case", SLICES)
def test_absurd_slices_of_a_real_request(daemon: RunningDaemon, case: str) -> None:
    with raw_engine(daemon.engines, SMALL, f"slices {case}") as engine, raw_peer(daemon.trainers) as trainer:
        engine.send(*frames(SMALL, 0, [Seg("1", 0, _segs()[0].rows, (1, 2, 3), opens=f"sliced {case}")]))
        engine.say(RequestFinished(1, "1", 4, "stop"))
        engine.await_ack(1)
        trainer.say(Pull(5, f"sliced {case}", **SLICES[case]))
        answer = trainer.to_trainer()
        assert isinstance(answer, Problem)
        assert (answer.nonce, answer.code) == (5, codes.BAD_REQUEST)


def test_pull_before_the_finish_is_not_ready_in_time(daemon: RunningDaemon) -> None:
    with raw_engine(daemon.engines, SMALL, "unfinished") as engine, raw_peer(daemon.trainers) as trainer:
        engine.send(*frames(SMALL, 0, [Seg("1", 0, _segs()[0].rows, (1, 2, 3), opens="unfinished")]))
        engine.await_ack(0)
        trainer.say(Pull(5, "unfinished", timeout_ms=50))
        answer = trainer.to_trainer()
        assert isinstance(answer, Problem)
        assert answer.code == codes.NOT_READY


def test_listing_and_describing_are_bounded(daemon: RunningDaemon) -> None:
    with raw_peer(daemon.trainers) as trainer:
        trainer.say(List(3, "no such state", 2**60, 2**60))
        assert trainer.to_trainer().entries == ()
        trainer.say(Describe(4, "x" * 100_000))
        assert trainer.to_trainer().lives == ()
