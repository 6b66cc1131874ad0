"""Beyond one machine: a daemon with keys lets in whom it knows, each to its own socket, and nobody else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zmq

from collector.cli.keygen import keygen
from collector.client import RouteClient
from collector.client.errors import NotAdmitted
from engine_side.shipping.shipper import Shipper
from protocol import codec
from protocol.keys import BadKeys, PeerKeys, peer_keys
from protocol.messages import Hello, Kind, Stat, Stats, Welcome
from tests.harness.daemon import RunningDaemon, running_daemon, serve_and_fail
from tests.harness.patches import SMALL
from tests.harness.waiting import wait_until
from tests.shipping.landings import landing

ANSWER_MS = 10_000
SILENCE_MS = 500


@dataclass(frozen=True)
class Keyed:
    """A daemon that any host could reach, and its key folders."""

    daemon: RunningDaemon
    keys: Path

    def near(self, endpoint: str) -> str:
        return endpoint.replace("0.0.0.0", "127.0.0.1")


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    keygen(tmp_path / "keys")
    options = ("--engines", "tcp://0.0.0.0:0", "--trainers", "tcp://0.0.0.0:0", "--keys", f"{tmp_path}/keys/collector")
    with running_daemon(tmp_path, *options) as daemon:
        yield Keyed(daemon, tmp_path / "keys")


def _answer(endpoint: str, keys: PeerKeys | None, sent: bytes, wait_ms: int) -> bytes | None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if keys is not None:
        socket.curve_secretkey, socket.curve_publickey = keys.secret, zmq.curve_public(keys.secret)
        socket.curve_serverkey = keys.collector
    try:
        socket.connect(endpoint)
        socket.send(sent)
        return socket.recv() if socket.poll(wait_ms) else None
    finally:
        socket.close()
        context.term()


def test_each_role_has_its_socket_and_only_that(keyed: Keyed) -> None:
    engine, trainer = peer_keys(keyed.keys / "engine", "engine"), peer_keys(keyed.keys / "trainer", "trainer")
    public, secret = zmq.curve_keypair()
    assert public
    stranger = PeerKeys(secret, engine.collector)
    feeds, reads = keyed.near(keyed.daemon.engines), keyed.near(keyed.daemon.trainers)
    hello, stat = codec.encode(Hello("engine", "incarnation", SMALL, 0)), codec.encode(Stat(1))

    answer = _answer(feeds, engine, hello, ANSWER_MS)
    assert answer is not None
    assert isinstance(codec.decode_to_engine([answer]), Welcome)
    answer = _answer(reads, trainer, stat, ANSWER_MS)
    assert answer is not None
    assert isinstance(codec.decode_to_trainer([answer]), Stats)
    for who in (trainer, stranger, None):
        assert _answer(feeds, who, hello, SILENCE_MS) is None
    for who in (engine, stranger, None):
        assert _answer(reads, who, stat, SILENCE_MS) is None
    with RouteClient(reads, timeout=5.0, keys=keyed.keys / "trainer") as client:
        stats = client.stats()
    assert stats["engines"] == 1.0
    assert stats["denied_wrong_role"] >= 2.0
    assert stats["denied_unknown_key"] >= 2.0


def test_rows_travel_encrypted_as_they_do_in_the_open(keyed: Keyed, seed: int) -> None:
    step = landing([("1", 0, 30, Kind.FORWARD)], opens=((0, "x"),), rng=np.random.default_rng(seed))
    shipper = Shipper(keyed.near(keyed.daemon.engines), SMALL, "engine", keys=keyed.keys / "engine")
    shipper.start()
    shipper.put(step)
    shipper.finish("1", 31, "stop")
    assert shipper.close()
    with RouteClient(keyed.near(keyed.daemon.trainers), keys=keyed.keys / "trainer") as client:
        routes = client.pull("x", token_ids=[*step.token_ids.tolist(), 0])
    assert np.array_equal(routes.array[:, list(SMALL.moe_layer_ids)], step.rows)


def test_a_client_without_the_right_key_is_told_so(keyed: Keyed, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(keyed.keys / "trainer", other)
    shutil.copy(keyed.keys / "engine" / "engine.secret", other / "trainer.secret")
    for keys in (None, other):
        with (
            RouteClient(keyed.near(keyed.daemon.trainers), timeout=30.0, keys=keys) as client,
            pytest.raises(NotAdmitted, match="serves with keys"),
        ):
            client.stats()


def test_an_engine_that_is_turned_away_ships_once_it_is_let_in(tmp_path: Path, seed: int) -> None:
    keygen(tmp_path / "keys")
    keygen(tmp_path / "late")
    options = ("--trainers", f"ipc://{tmp_path}/trainers.sock", "--keys", f"{tmp_path}/keys/collector")
    shutil.copy(tmp_path / "keys" / "engine" / "collector.public", tmp_path / "late" / "engine" / "collector.public")
    with running_daemon(tmp_path, "--engines", "tcp://127.0.0.1:0", *options) as first:
        port = first.engines
        shipper = Shipper(port, SMALL, "engine", keys=tmp_path / "late" / "engine")
        shipper.start()
        shipper.put(landing([("1", 0, 5, Kind.FORWARD)], opens=((0, "x"),), rng=np.random.default_rng(seed)))
        shipper.finish("1", 6, "stop")
        with RouteClient(first.trainers, keys=tmp_path / "keys" / "trainer") as client:
            wait_until(lambda: client.stats()["denied_unknown_key"] >= 1.0, "it is turned away")
    shutil.copy(tmp_path / "late" / "collector" / "engine.public", tmp_path / "keys" / "collector" / "engine-b.public")
    with running_daemon(tmp_path, "--engines", port, *options) as second:
        with RouteClient(second.trainers, keys=tmp_path / "keys" / "trainer") as client:
            assert len(client.pull("x", timeout=30.0).array) == 5
        assert shipper.close()


def test_keys_are_wanted_where_other_machines_reach(tmp_path: Path) -> None:
    code, said = serve_and_fail("--engines", "tcp://0.0.0.0:0", "--trainers", f"ipc://{tmp_path}/t.sock")
    assert code == 1
    assert "keygen" in said
    code, said = serve_and_fail("--engines", "tcp://0.0.0.0:0", "--keys", str(tmp_path / "nothing"))
    assert code == 1
    assert "no folder of keys" in said


def test_bad_keys_are_heard_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(BadKeys):
        Shipper(f"ipc://{tmp_path}/e.sock", SMALL, "engine", keys=tmp_path / "nothing")
    with pytest.raises(BadKeys):
        RouteClient(f"ipc://{tmp_path}/t.sock", keys=tmp_path / "nothing")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in_even_through_an_open_path(tmp_path: Path) -> None:
    """The path is private; were it not, the peer's user id is looked at, too."""
    with running_daemon(tmp_path) as daemon:
        path = Path(daemon.trainers.removeprefix("ipc://"))
        for folder in (path, *path.parents):
            if folder.stat().st_uid == 0 and str(folder).startswith(str(tmp_path.parent.parent)):
                folder.chmod(0o777)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65_534)
                os._exit(0 if _answer(daemon.trainers, None, codec.encode(Stat(1)), SILENCE_MS) is None else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert _answer(daemon.trainers, None, codec.encode(Stat(1)), ANSWER_MS) is not None
