"""CURVE keys as files: who may feed a collector, and who may read it.

A folder is what one party holds, ready to be copied to it. Its secret is its own; the public keys are the others'.

    collector/  collector.secret  engine*.public  trainer*.public
    engine/     engine.secret     collector.public
    trainer/    trainer.secret    collector.public

Each file is one line: a Curve25519 key in Z85, 40 characters.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from protocol.errors import R3Error

Role: TypeAlias = Literal["engine", "trainer"]

COLLECTOR: Final = "collector"
ROLES: Final[tuple[Role, ...]] = ("engine", "trainer")
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class BadKeys(R3Error):
    """A key folder that lacks a file, holds something else, or lets others read a secret."""


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """What an engine or a trainer needs: its own secret, and the public key of the collector it means."""

    secret: bytes = field(repr=False)
    collector: bytes


@dataclass(frozen=True, slots=True)
class CollectorKeys:
    """What a collector needs: its own secret, and whom it lets in."""

    secret: bytes = field(repr=False)
    engines: frozenset[bytes]
    trainers: frozenset[bytes]


def peer_keys(folder: Path | str, role: Role) -> PeerKeys:
    """Keys of an engine or a trainer. Raises BadKeys."""
    at = _folder(folder)
    return PeerKeys(_secret(at / f"{role}.secret"), _public(at / f"{COLLECTOR}.public"))


def collector_keys(folder: Path | str) -> CollectorKeys:
    """Keys of a collector. Raises BadKeys; also when a key stands for both roles, or nobody could come in."""
    at = _folder(folder)
    engines, trainers = (frozenset(map(_public, sorted(at.glob(f"{role}*.public")))) for role in ROLES)
    if not engines or not trainers:
        raise BadKeys(f"{at} names no engine*.public or no trainer*.public: nobody could come in")
    if engines & trainers:
        raise BadKeys(f"{at}: one key is an engine's and a trainer's, but neither may do what the other does")
    return CollectorKeys(_secret(at / f"{COLLECTOR}.secret"), engines, trainers)


def write_folders(base: Path, pairs: Mapping[str, tuple[bytes, bytes]]) -> list[Path]:
    """Lay the three folders out under `base`. pairs: (public, secret) of "collector", "engine" and "trainer". Raises
    BadKeys when one of them is there already: a key that is in use is never overwritten."""
    folders = {name: base / name for name in (COLLECTOR, *ROLES)}
    for folder in folders.values():
        if folder.exists():
            raise BadKeys(f"{folder} is there already: move it away, or choose another folder")
    try:
        for name, folder in folders.items():
            folder.mkdir(mode=0o700, parents=True)
            _write(folder / f"{name}.secret", pairs[name][1])
            for other in ROLES if name == COLLECTOR else (COLLECTOR,):
                _write(folder / f"{other}.public", pairs[other][0])
    except OSError as error:
        raise BadKeys(f"cannot write keys under {base}: {error.strerror}") from None
    return list(folders.values())


def _write(path: Path, key: bytes) -> None:
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(key.decode() + "\n")


def _folder(folder: Path | str) -> Path:
    at = Path(folder)
    if not at.is_dir():
        raise BadKeys(f"{at} is no folder of keys: make one with `r3-collector keygen`")
    return at


def _secret(path: Path) -> bytes:
    key = _public(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise BadKeys(f"{path} can be read by others: chmod 600 it, or make new keys if anybody did")
    return key


def _public(path: Path) -> bytes:
    try:
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadKeys(f"cannot read the key {path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    if not _Z85.fullmatch(text):
        raise BadKeys(f"{path} is not a key: one line of 40 characters, as `r3-collector keygen` writes it")
    return text.encode()
