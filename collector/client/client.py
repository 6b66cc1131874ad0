"""A plain blocking client: one DEALER, answers matched by nonce."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import parse_monitor_message

from collector.client.errors import BadRequest, CollectorUnreachable, NotAdmitted, RequestAborted, WrongTokens, error_of
from collector.client.routes import Routes
from collector.endpoints import trainers_endpoint
from protocol import codec, codes
from protocol import messages as wire
from protocol.errors import ProtocolError
from protocol.keys import peer_keys

_T = TypeVar("_T")

_SLACK_S = 2.0
"""How much longer than the pull's own deadline an answer may take before the collector counts as gone."""

_HEARTBEAT_MS: Final = 2_000
_TURNED_AWAY: Final = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""What no restart of a collector looks like."""
_CONNECTED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED

_WINDOW = 32
"""Pulls under way at once: enough to hide the round trip, few enough to bound memory on both sides."""


class RouteClient:
    """Pulls routed experts from a collector. One client belongs to one thread. What is not answered when the connection
    breaks, or the collector is started again, is asked again by itself.

    address: the collector's trainer endpoint (default: $R3_COLLECTOR, then the per-user ipc path). timeout: seconds a
    pull may wait for its request to settle, unless the call says otherwise. keys: a trainer's key folder, as
    `r3-collector keygen` made it (default: $R3_KEYS), for a collector that serves with keys.

    Raises BadRequest for what is no address, BadKeys for what is no key folder.
    """

    def __init__(self, address: str | None = None, timeout: float = 30.0, *, keys: Path | str | None = None) -> None:
        self.address = address or os.environ.get("R3_COLLECTOR") or trainers_endpoint()
        self.timeout = timeout
        self._nonces = itertools.count(1)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A connection that says nothing for three of these is made again: its other end may be gone without a word.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
        folder = keys or os.environ.get("R3_KEYS")
        try:
            if folder:
                known = peer_keys(folder, "trainer")
                self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(known.secret))
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, known.secret)
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, known.collector)
        except BaseException:
            self._socket.close()
            raise
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_TURNED_AWAY | _CONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self._connections = 0
        self._unanswered: dict[int, wire.TrainerMessage] = {}
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise BadRequest(f"{self.address!r} is not an address: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket. Pulls under way are forgotten by the collector at their deadline."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def pull(
        self,
        request_id: str,
        num_tokens: int | None = None,
        token_ids: Sequence[int] | NDArray[np.integer[Any]] | None = None,
        timeout: float | None = None,
        *,
        axis: Literal["all", "moe"] = "all",
        layers: Sequence[int] | None = None,
        rows: tuple[int, int] | None = None,
        dtype: Literal["int16", "uint8", "int32"] = "int16",
        partial: bool = False,
    ) -> Routes:
        """Routes of one request, waiting up to `timeout` seconds until it has settled.

        num_tokens: prompt and generated tokens kept by the trainer (default: the engine's own count, or the length of
        token_ids). token_ids: int[num_tokens], checked against the tokens the rows belong to. partial: return an
        aborted prefix or an array with missing rows (-1) instead of raising.

        Raises UnknownRequest, NotReady, RequestIncomplete (`.missing`), RequestAborted (`.routes` is the prefix),
        RequestLost, RequestFailed, ReleasedRequest, AmbiguousRequest, WrongTokens, LengthMismatch, BadRequest,
        CollectorUnreachable.
        """
        ask = self._ask(request_id, num_tokens, token_ids, timeout, axis, layers, rows, dtype, partial)
        return self._finish(ask, self._exchange([ask], None if token_ids is None else [token_ids])[0], token_ids)

    def pull_many(
        self,
        request_ids: Iterable[str],
        num_tokens: Sequence[int] | None = None,
        token_ids: Sequence[Sequence[int] | NDArray[np.integer[Any]]] | None = None,
        timeout: float | None = None,
        *,
        axis: Literal["all", "moe"] = "all",
        layers: Sequence[int] | None = None,
        dtype: Literal["int16", "uint8", "int32"] = "int16",
        partial: bool = False,
    ) -> list[Routes]:
        """`pull` of many requests under one deadline, in the order asked. Raises what the first failing one raises."""
        ids = list(request_ids)
        for given, name in ((num_tokens, "num_tokens"), (token_ids, "token_ids")):
            if given is not None and len(given) != len(ids):
                raise BadRequest(f"{name} has {len(given)} entries for {len(ids)} requests")
        asks = [
            self._ask(
                request_id,
                num_tokens[i] if num_tokens is not None else None,
                token_ids[i] if token_ids is not None else None,
                timeout,
                axis,
                layers,
                None,
                dtype,
                partial,
            )
            for i, request_id in enumerate(ids)
        ]
        answers = self._exchange(asks, token_ids)
        return [
            self._finish(ask, answer, token_ids[i] if token_ids is not None else None)
            for i, (ask, answer) in enumerate(zip(asks, answers, strict=True))
        ]

    def release(self, request_ids: str | Iterable[str]) -> int:
        """Tell the collector that these requests are done with. Returns how many it knew; repeating is harmless."""
        ids = (request_ids,) if isinstance(request_ids, str) else tuple(request_ids)
        return self._call(wire.Release(self._nonce(), ids), wire.Released).released

    def describe(self, request_id: str) -> tuple[wire.LifeStory, ...]:
        """The story of every run that carries this id; empty when there is none."""
        return self._call(wire.Describe(self._nonce(), request_id), wire.Description).lives

    def requests(self, state: str = "", after: int = 0, limit: int = 100) -> wire.Listing:
        """One page of the requests the collector knows, oldest first; `.next` is the cursor of the next page."""
        return self._call(wire.List(self._nonce(), state, after, limit), wire.Listing)

    def stats(self) -> dict[str, float]:
        """The collector's counters and gauges."""
        return self._call(wire.Stat(self._nonce()), wire.Stats).values

    # ------------------------------------------------------------------ plumbing

    def _nonce(self) -> int:
        return next(self._nonces)

    def _ask(
        self,
        request_id: str,
        num_tokens: int | None,
        token_ids: Sequence[int] | NDArray[np.integer[Any]] | None,
        timeout: float | None,
        axis: Literal["all", "moe"],
        layers: Sequence[int] | None,
        rows: tuple[int, int] | None,
        dtype: Literal["int16", "uint8", "int32"],
        partial: bool,
    ) -> wire.Pull:
        if token_ids is not None:
            if num_tokens is None:
                num_tokens = len(token_ids)
            elif len(token_ids) < num_tokens - 1:
                raise BadRequest(f"{request_id}: {len(token_ids)} token_ids for num_tokens={num_tokens}", request_id)
        digest = None
        if token_ids is not None and num_tokens is not None:
            digest = codec.token_digest(np.asarray(token_ids)[: num_tokens - 1])
        seconds = self.timeout if timeout is None else timeout
        return wire.Pull(
            self._nonce(),
            request_id,
            num_tokens,
            digest,
            max(0, int(seconds * 1e3)),
            rows,
            tuple(layers) if layers is not None else None,
            axis,
            dtype,
            partial,
        )

    def _finish(
        self, ask: wire.Pull, answer: Routes | wire.Problem, token_ids: Sequence[int] | NDArray[Any] | None
    ) -> Routes:
        if isinstance(answer, Routes):
            return answer
        error = error_of(answer)
        if isinstance(error, RequestAborted) and answer.code == codes.ABORTED:
            again = msgspec.structs.replace(ask, nonce=self._nonce(), partial=True, timeout_ms=0)
            prefix = self._exchange([again], None if token_ids is None else [token_ids])[0]
            error.routes = prefix if isinstance(prefix, Routes) else None
        raise error

    def _exchange(self, asks: list[wire.Pull], token_ids: Sequence[Any] | None = None) -> list[Routes | wire.Problem]:
        """Send pulls, at most `_WINDOW` under way, and collect the answers in order."""
        self._unanswered.clear()
        answers: dict[int, Routes | wire.Problem] = {}
        wanted = {ask.nonce: ask for ask in asks}
        tokens = dict(zip(wanted, token_ids, strict=True)) if token_ids is not None else {}
        queue = iter(asks)
        for ask in itertools.islice(queue, _WINDOW):
            self._send(ask)
        seconds = max((ask.timeout_ms for ask in asks), default=0) / 1e3
        begun = time.monotonic()
        deadline = begun + seconds + _SLACK_S
        while len(answers) < len(asks):
            frames = self._receive(deadline)
            header = self._decode(frames)
            if header.nonce not in wanted or not isinstance(header, wire.Routes | wire.Problem):
                continue
            ask = wanted.pop(header.nonce)
            self._unanswered.pop(ask.nonce, None)
            answers[ask.nonce] = (
                _open(header, frames, ask, tokens.get(ask.nonce)) if isinstance(header, wire.Routes) else header
            )
            deadline = max(deadline, time.monotonic() + _SLACK_S)
            following = next(queue, None)
            if following is not None:
                # One deadline for all: what waited for its turn has less left.
                left = max(0, int((begun + seconds - time.monotonic()) * 1e3))
                self._send(msgspec.structs.replace(following, timeout_ms=min(following.timeout_ms, left)))
        return [answers[ask.nonce] for ask in asks]

    def _call(self, message: wire.TrainerMessage, expected: type[_T]) -> _T:
        self._unanswered.clear()
        self._send(message)
        deadline = time.monotonic() + self.timeout + _SLACK_S
        while True:
            header = self._decode(self._receive(deadline))
            if header.nonce != message.nonce:
                continue
            if isinstance(header, wire.Problem):
                raise error_of(header)
            if isinstance(header, expected):
                return header

    def _send(self, message: wire.TrainerMessage) -> None:
        self._unanswered[message.nonce] = message
        self._put(message)

    def _put(self, message: wire.TrainerMessage) -> None:
        try:
            self._socket.send(codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise self._unreachable() from None

    def _receive(self, deadline: float) -> list[zmq.Frame]:
        while True:
            left = max(0, int((deadline - time.monotonic()) * 1e3))
            ready = dict(self._poller.poll(left))
            if self._monitor in ready:
                self._heed(parse_monitor_message(self._monitor.recv_multipart())["event"])
            elif self._socket in ready:
                return self._socket.recv_multipart(copy=False)
            elif not left:
                raise self._unreachable()

    def _heed(self, event: int) -> None:
        """What became of the connection."""
        if event & _TURNED_AWAY:
            raise NotAdmitted(
                f"the collector at {self.address} does not let this client in: it serves with keys, and wants "
                "keys=FOLDER (or $R3_KEYS) to be the trainer's folder that `r3-collector keygen` made with its own"
            )
        self._connections += 1
        if self._connections > 1:
            # Another collector process, or another connection: it may never have heard what the last one was asked.
            for message in self._unanswered.values():
                self._put(message)

    def _decode(self, frames: list[zmq.Frame]) -> wire.CollectorToTrainer:
        return codec.decode_to_trainer([frame.buffer for frame in frames])

    def _unreachable(self) -> CollectorUnreachable:
        return CollectorUnreachable(f"no answer from a collector at {self.address}: is `r3-collector serve` running?")


def _open(header: wire.Routes, frames: list[zmq.Frame], ask: wire.Pull, tokens: Any = None) -> Routes:
    # Of an incomplete array the digest has holes that a slice need not show; of an aborted one it covers the prefix.
    checkable = tokens is not None and header.status != "incomplete" and not header.missing
    if checkable and header.token_digest != codec.token_digest(np.asarray(tokens)[: header.num_tokens - 1]):
        raise WrongTokens(f"{header.request_id}: the rows belong to other tokens", header.request_id)
    flat = np.frombuffer(frames[1].buffer, dtype=np.dtype(header.dtype))
    if flat.size != int(np.prod(header.shape)):
        raise ProtocolError("rows", f"{header.request_id}: {flat.size} cells for shape {header.shape}")
    # A copy: the array must be writable and must not keep the socket's memory alive.
    array = flat.reshape(header.shape).copy()
    geometry = header.geometry
    return Routes(
        request_id=header.request_id,
        status=header.status,
        array=array,
        num_tokens=header.num_tokens,
        num_experts=geometry.num_experts,
        num_layers=geometry.num_layers,
        moe_layer_ids=geometry.moe_layer_ids,
        layers=header.layers,
        weight_spans=header.weight_spans,
        provenance=header.provenance,
        missing=header.missing,
        trimmed=header.trimmed,
        row_start=header.row_start,
        engine_id=header.engine_id,
    )
