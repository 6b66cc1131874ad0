"""A stream, and what a collector's end of its connection receives."""

from __future__ import annotations

from typing import Any

from engine_side.shipping.stream import Stream
from protocol import codec
from protocol.messages import EngineMessage, Hello, Welcome
from tests.harness.patches import SMALL

ROOM = 1 << 20


class Line:
    """A stream and a collector's end of its connection; keeps what it received since it last looked."""

    def __init__(self, cap: int = ROOM, window: int = ROOM) -> None:
        self.stream = Stream(SMALL, "engine", "incarnation", cap)
        self.window = window
        self.now = 10.0

    def hello(self) -> Hello:
        message = self.stream.keep_alive(self.now)
        assert isinstance(message, Hello)
        self.stream.greeted(self.now)
        return message

    def welcome(self, next_seq: int = 0, state_id: str = "s") -> list[EngineMessage]:
        self.stream.hear(Welcome(state_id, next_seq, self.window))
        return self.receive()

    def receive(self) -> list[EngineMessage]:
        """Everything that may be sent now."""
        while self.stream.take():
            pass
        found = []
        while (entry := self.stream.due()) is not None:
            self.stream.sent(entry)
            message = codec.decode_from_engine(entry.frames)
            assert getattr(message, "seq", None) == entry.seq
            found.append(message)
        return found

    def put(self, *items: Any) -> None:
        self.stream.queue.extend(items)


def kinds_of(messages: list[EngineMessage]) -> list[type]:
    return [type(message) for message in messages]
