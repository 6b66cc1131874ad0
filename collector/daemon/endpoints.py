"""Binding: one owner per path, nothing that other users reach; and other machines only with keys."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from collector.daemon.errors import StartError

_HEARTBEAT_MS = 10_000


class Bound:
    """A bound socket and, for ipc, the lock that keeps a second daemon from stealing its path. keyed: whether it speaks
    CURVE; only then may other machines reach it. Raises StartError."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, *, keyed: bool = False) -> None:
        self.socket = socket
        self._path: Path | None = None
        self._lock: int | None = None
        # A machine that vanished says no goodbye, nor does a process that was stopped: what waits for it is memory.
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, 3 * _HEARTBEAT_MS
        socket.handshake_ivl = _HEARTBEAT_MS
        scheme, _, rest = endpoint.partition("://")
        if scheme == "ipc":
            self._bind_ipc(rest, endpoint)
        elif scheme == "tcp":
            _check_tcp(rest, endpoint, keyed)
            self._bind(endpoint)
        else:
            raise StartError(f"{endpoint!r}: an endpoint is ipc://PATH or tcp://127.0.0.1:PORT")
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket and give the path up."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)

    def _bind_ipc(self, path: str, endpoint: str) -> None:
        if not path.startswith("/"):
            raise StartError(f"{endpoint!r}: an ipc path is absolute, like ipc:///run/r3/engines.sock")
        if len(os.fsencode(path)) > 100:
            raise StartError(f"{endpoint!r}: a socket path has at most 100 bytes, this one {len(os.fsencode(path))}")
        self._path = Path(path)
        private_directory(self._path.parent)
        # A second bind on an ipc path succeeds and silently steals it: the lock is what refuses.
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            self._path = None
            raise StartError(f"another collector serves {endpoint}: stop it, or choose another path") from None
        self._lock = lock
        if self._path.exists() and not self._path.is_socket():
            self._path = None
            os.close(lock)
            raise StartError(f"{path} is not a socket: it is left as it is, choose another path")
        self._path.unlink(missing_ok=True)
        # Root can do as it likes anyway: its command line should work.
        for uid in sorted({0, os.getuid()}):
            self.socket.setsockopt(zmq.IPC_FILTER_UID, uid)
        self._bind(endpoint)
        self._path.chmod(0o600)

    def _bind(self, endpoint: str) -> None:
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            if self._lock is not None:
                os.close(self._lock)
            hint = "it is taken: choose another port" if error.errno == zmq.EADDRINUSE else str(error)
            raise StartError(f"cannot bind {endpoint}: {hint}") from None


def _check_tcp(address: str, endpoint: str, keyed: bool) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port in ("*", "0") or (port.isdigit() and int(port) < 65_536)):
        raise StartError(f"{endpoint!r}: a tcp endpoint is tcp://127.0.0.1:PORT, with a port below 65536")
    if keyed:
        return
    host = host.strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise StartError(
            f"{endpoint!r} is reachable from other machines: bind 127.0.0.1 or an ipc path, or make keys with "
            "`r3-collector keygen DIR` and serve with --keys DIR/collector"
        )


def private_directory(path: Path) -> None:
    """Make a directory that its user alone can enter, or make sure that it is one. Raises StartError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise StartError(f"cannot make {path}: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        raise StartError(f"{path} is not a directory")
    if info.st_uid != os.getuid():
        raise StartError(f"{path} belongs to user {info.st_uid}: choose a directory of our own")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise StartError(f"others can enter {path}: chmod 700 it, or name a directory in it, which is made so")
