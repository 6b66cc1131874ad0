"""Binding: one owner per path, nothing reachable from other machines or other users."""

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


class Bound:
    """A bound socket and, for ipc, the lock that keeps a second daemon from stealing its path."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self.socket = socket
        self._path: Path | None = None
        self._lock: int | None = None
        scheme, _, rest = endpoint.partition("://")
        if scheme == "ipc":
            self._bind_ipc(rest, endpoint)
        elif scheme == "tcp":
            _require_loopback(rest, endpoint)
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
        _private_directory(self._path.parent)
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


def _require_loopback(address: str, endpoint: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port in ("*", "0") or (port.isdigit() and int(port) < 65_536)):
        raise StartError(f"{endpoint!r}: a tcp endpoint is tcp://127.0.0.1:PORT, with a port below 65536")
    host = host.strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise StartError(f"{endpoint!r} is reachable from other machines: bind 127.0.0.1 or an ipc path")


def _private_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise StartError(f"cannot make {path}: {error.strerror}") from None
    if info.st_uid not in (os.getuid(), 0):
        raise StartError(f"{path} belongs to user {info.st_uid}: sockets need a directory of our own")
    if stat.S_IMODE(info.st_mode) & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise StartError(f"{path} is writable by others: chmod 700 it, or choose another directory")
