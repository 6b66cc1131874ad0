"""Key folders: what one party holds, and what is wrong with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from protocol.keys import BadKeys, collector_keys, peer_keys, write_folders


@pytest.fixture
def made(tmp_path: Path) -> Path:
    write_folders(tmp_path, {name: zmq.curve_keypair() for name in ("collector", "engine", "trainer")})
    return tmp_path


def test_folders_fit_together(made: Path) -> None:
    collector = collector_keys(made / "collector")
    engine, trainer = peer_keys(made / "engine", "engine"), peer_keys(str(made / "trainer"), "trainer")
    assert collector.engines == {zmq.curve_public(engine.secret)}
    assert collector.trainers == {zmq.curve_public(trainer.secret)}
    assert engine.collector == trainer.collector == zmq.curve_public(collector.secret)
    assert collector.secret.decode() not in repr(collector)
    assert engine.secret.decode() not in repr(engine)


def test_more_engines_come_in_by_their_file(made: Path) -> None:
    public, _ = zmq.curve_keypair()
    (made / "collector" / "engine-b.public").write_bytes(public + b"\n")
    assert public in collector_keys(made / "collector").engines


def test_secrets_are_for_their_owner(made: Path) -> None:
    for path in made.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_key_that_is_there_is_never_overwritten(made: Path) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*.*")}
    shutil.rmtree(made / "collector")
    with pytest.raises(BadKeys, match="is there already"):
        write_folders(made, {name: zmq.curve_keypair() for name in ("collector", "engine", "trainer")})
    assert not (made / "collector").exists()
    assert all(path.read_bytes() == key for path, key in before.items() if "collector/" not in str(path))


WRONG: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no folder": ("no folder of keys", lambda at: shutil.rmtree(at)),
    "no secret": ("cannot read the key", lambda at: (at / "collector.secret").unlink()),
    "a secret that others read": ("can be read by others", lambda at: (at / "collector.secret").chmod(0o640)),
    "no key": ("is not a key", lambda at: (at / "engine.public").write_text("short\n")),
    "bytes": ("cannot read the key", lambda at: (at / "engine.public").write_bytes(bytes(range(200, 240)))),
    "nobody feeds": ("nobody could come in", lambda at: (at / "engine.public").unlink()),
    "nobody reads": ("nobody could come in", lambda at: (at / "trainer.public").unlink()),
    "both roles": ("one key", lambda at: shutil.copy(at / "engine.public", at / "trainer-2.public")),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_that_is_wrong_says_how(made: Path, case: str) -> None:
    said, spoil = WRONG[case]
    spoil(made / "collector")
    with pytest.raises(BadKeys, match=said):
        collector_keys(made / "collector")
