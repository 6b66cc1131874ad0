"""The shipper's thread: what it promises an engine whatever the collector does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from engine_side.shipping.shipper import Shipper
from protocol import codec
from protocol.messages import Ack, Bye, Hello, Welcome
from tests.harness.patches import SMALL
from tests.harness.waiting import wait_until
from tests.shipping.landings import decode


@contextmanager
def a_router(folder: Path) -> Iterator[zmq.Socket[bytes]]:
    """A collector's socket, and no collector behind it."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(f"ipc://{folder}/engines.sock")
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def hear(socket: zmq.Socket[bytes]) -> tuple[bytes, object]:
    assert socket.poll(10_000), "the shipper says nothing"
    peer, *frames = socket.recv_multipart()
    return peer, codec.decode_from_engine(frames)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_put_neither_blocks_nor_raises_when_nobody_is_there_and_close_says_what_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipper = Shipper(f"ipc://{tmp_path}/nobody.sock", SMALL, "engine", window_cap_bytes=80)
    shipper.start()
    freed: list[int] = []
    for i in range(100):
        shipper.put(decode("1", i, free=lambda i=i: freed.append(i), opens=((0, "x"),) if i == 0 else ()))
    shipper.finish("1", 101, "stop")
    wait_until(lambda: shipper.stats().next_seq == 101, "all is in the window")
    stats = shipper.stats()
    assert stats.held_bytes == 80
    assert (stats.patches, stats.rows_lost) == (10, 90)
    assert freed == list(range(100))
    started = time.monotonic()
    assert not shipper.close(0.2)
    assert time.monotonic() - started < 5
    assert "101 messages that the collector never acknowledged" in caplog.text
    assert not stats.connected


def test_behind_close_nothing_piles_up(tmp_path: Path) -> None:
    shipper = Shipper(f"ipc://{tmp_path}/nobody.sock", SMALL, "engine")
    shipper.start()
    assert shipper.close(0.2), "nothing was put, so nothing is lost"
    freed: list[int] = []
    shipper.put(decode("1", 0, free=lambda: freed.append(0)))
    shipper.finish("1", 2, "stop")
    shipper.lost(decode("1", 1).plan)
    assert freed == [0]
    assert shipper.close(0.2)
    assert shipper.stats().next_seq == 0


def test_a_shipper_that_was_never_started_closes(tmp_path: Path) -> None:
    before = descriptors()
    shipper = Shipper(f"ipc://{tmp_path}/nobody.sock", SMALL, "engine")
    assert shipper.close(0.2)
    assert descriptors() == before


def test_goodbye_is_said_and_nothing_stays_behind(tmp_path: Path) -> None:
    with a_router(tmp_path) as router:
        before = descriptors()
        shipper = Shipper(f"ipc://{tmp_path}/engines.sock", SMALL, "engine")
        shipper.start()
        peer, hello = hear(router)
        assert isinstance(hello, Hello)
        assert (hello.engine_id, hello.incarnation) == ("engine", shipper.incarnation)
        router.send_multipart([peer, codec.encode(Welcome("s", 0, 1 << 20))])
        wait_until(lambda: shipper.stats().connected, "the shipper is welcome")
        assert shipper.close(5.0)
        said = hear(router)[1]
        while not isinstance(said, Bye):
            said = hear(router)[1]
        # The router's own end of the connection closes when it notices.
        wait_until(lambda: descriptors() <= before, "its descriptors are gone")
    assert not [t for t in threading.enumerate() if t.name == "r3-shipper"]


def test_two_shippers_of_one_engine_are_two_incarnations(tmp_path: Path) -> None:
    pair = [Shipper(f"ipc://{tmp_path}/nobody.sock", SMALL, "engine") for _ in range(2)]
    assert pair[0].incarnation != pair[1].incarnation
    assert all(each.close(0.1) for each in pair)


def test_a_thread_that_failed_frees_what_it_held_and_what_comes_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with a_router(tmp_path) as router:
        shipper = Shipper(f"ipc://{tmp_path}/engines.sock", SMALL, "engine")
        shipper.start()
        peer, _ = hear(router)
        router.send_multipart([peer, codec.encode(Welcome("s", 99, 1 << 20))])
        wait_until(lambda: "the shipper stopped" in caplog.text, "a collector out of its mind ends the thread")
        wait_until(lambda: not [t for t in threading.enumerate() if t.name == "r3-shipper"], "it is gone")
        freed: list[int] = []
        for i in range(3):
            shipper.put(decode("1", i, free=lambda i=i: freed.append(i)))
        shipper.finish("1", 4, "stop")
        shipper.lost(decode("1", 4).plan)
        assert freed == [0, 1, 2]
        assert shipper.stats().errors == 1
        assert "asks for message 99" in caplog.text
        shipper.close(0.2)


def test_bytes_that_are_no_message_do_not_stop_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with a_router(tmp_path) as router:
        shipper = Shipper(f"ipc://{tmp_path}/engines.sock", SMALL, "engine")
        shipper.start()
        peer, _ = hear(router)
        for junk in (b"", b"\x07\x91", b"\x01" + b"\x91" * 5000, b"\x01\x91\x63"):
            router.send_multipart([peer, junk])
        router.send_multipart([peer, codec.encode(Welcome("s", 0, 1 << 20))])
        wait_until(lambda: shipper.stats().connected, "the shipper is welcome")
        assert caplog.text.count("the collector sent something else") == 4
        assert shipper.close(5.0)


@contextmanager
def a_busy_shipper(folder: Path) -> Iterator[tuple[Shipper, zmq.Socket[bytes]]]:
    """Welcomed, and with a step just shipped: it looks for the next one by itself."""
    with a_router(folder) as router:
        shipper = Shipper(f"ipc://{folder}/engines.sock", SMALL, "engine")
        shipper.start()
        peer, _ = hear(router)
        router.send_multipart([peer, codec.encode(Welcome("s", 0, 1 << 20))])
        wait_until(lambda: shipper.stats().connected, "the shipper is welcome")
        shipper.put(decode("1", 0, opens=((0, "x"),)))
        wait_until(lambda: shipper.stats().patches == 1, "the first step left")
        yield shipper, router
        shipper.close(0.1)


def test_while_the_engine_is_at_work_in_python_its_step_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_side.shipping.shipper._PATIENCE_S", 3600.0)
    with a_busy_shipper(tmp_path) as (shipper, _):
        # The nap that it may be in when the flag goes up ends before the next look at the queue.
        shipper.quiet = True
        naps: list[float] = []
        monkeypatch.setattr("engine_side.shipping.shipper.time", _Naps(naps))
        wait_until(lambda: len(naps) > 2, "it naps")
        shipper.put(decode("1", 1))
        seen = len(naps)
        wait_until(lambda: len(naps) > seen + 5, "it looked at the queue again and again")
        assert shipper.stats().patches == 1
        shipper.quiet = False
        wait_until(lambda: shipper.stats().patches == 2, "the step leaves while the engine waits for its device")


class _Naps:
    """The module `time`, counting naps."""

    def __init__(self, naps: list[float]) -> None:
        self._naps = naps

    monotonic = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        self._naps.append(seconds)
        time.sleep(seconds)


def test_an_engine_that_never_launches_again_ships_its_last_step_all_the_same(tmp_path: Path) -> None:
    with a_busy_shipper(tmp_path) as (shipper, _):
        shipper.quiet = True
        shipper.put(decode("1", 1))
        wait_until(lambda: shipper.stats().patches == 2, "the last step leaves")


def test_closing_does_not_wait_for_the_engine_to_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_side.shipping.shipper._PATIENCE_S", 3600.0)
    with a_busy_shipper(tmp_path) as (shipper, router):
        shipper.quiet = True
        shipper.put(decode("1", 1))
        began = time.monotonic()
        shipper.close(0.5)
        assert time.monotonic() - began < 4
        assert shipper.stats().patches == 2
        assert router.poll(1000)


def test_an_engine_that_would_rather_wait_is_held_once_an_outage_and_loses_nothing_meanwhile(tmp_path: Path) -> None:
    with a_router(tmp_path) as router:
        shipper = Shipper(
            f"ipc://{tmp_path}/engines.sock", SMALL, "engine", window_cap_bytes=8 * 4, on_full="wait", wait_s=0.5
        )
        shipper.start()
        peer, _ = hear(router)
        router.send_multipart([peer, codec.encode(Welcome("s", 0, 1 << 20))])
        wait_until(lambda: shipper.stats().connected, "the shipper is welcome")
        for outage in range(2):
            taken = 3 + shipper.stats().next_seq
            for at in range(3):
                shipper.put(decode("1", taken + at))
            wait_until(lambda: shipper._crowded, "three of four rows are in the window")
            assert shipper.stats().next_seq == taken
            began = time.monotonic()
            shipper.put(decode("1", 90))
            held = time.monotonic() - began
            assert held >= 0.5, "nobody acknowledges, so the whole patience of this outage is spent"
            began = time.monotonic()
            for at in range(5):
                shipper.put(decode("1", 91 + at))
            assert time.monotonic() - began < 0.4, "and not a second time"
            end = taken + 6
            wait_until(lambda end=end: shipper.stats().next_seq == end, "then rows are lost")
            assert shipper.stats().rows_lost == 5 * (outage + 1)
            router.send_multipart([peer, codec.encode(Ack("s", end - 1, 1 << 20))])
            wait_until(lambda: not shipper._crowded, "an acknowledgement ends the outage")
        shipper.put(decode("1", 90))
        shipper.put(decode("1", 91))
        shipper.put(decode("1", 92))
        wait_until(lambda: shipper._crowded, "again")
        seq = shipper.stats().next_seq
        late = threading.Timer(0.05, lambda: router.send_multipart([peer, codec.encode(Ack("s", seq, 1 << 20))]))
        late.start()
        shipper.put(decode("1", 93))
        late.join()
        assert shipper.stats().rows_lost == 10, "it was held until there was room"
        shipper.close(0.2)


@pytest.mark.parametrize("wrong", [{"on_full": "block"}, {"wait_s": -1.0}, {"wait_s": float("nan")}])
def test_an_odd_wish_for_a_full_window_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Shipper(f"ipc://{tmp_path}/engines.sock", SMALL, "engine", **wrong)  # type: ignore[arg-type]
