"""One life: one run of one request in one engine process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from protocol.messages import Range

if TYPE_CHECKING:
    from collector.core.sessions import Session


class State(StrEnum):
    """`complete` is final; `incomplete` may still be filled; the last three never serve a complete array."""

    OPEN = "open"
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    ABORTED = "aborted"
    LOST = "lost"
    FAILED = "failed"


STORY_EVENTS = 16
"""Events a life remembers for `show`."""


@dataclass(slots=True, eq=False)
class Life:
    """State of one life. `slot` indexes the numpy columns of `LifeTable`."""

    session: Session
    req_id: str
    name: str
    slot: int
    serial: int
    opened_at: float
    state: State = State.OPEN
    pages: list[int] = field(default_factory=list)
    num_tokens: int | None = None
    reason: str = ""
    ended: bool = False
    """The emitter itself said the end, in sequence: later rows of this life are surplus."""
    flush_asked: int | None = None
    flush_asked_at: float = 0.0
    flush_digest: bytes | None = None
    """Digest of the tokens of whoever asked, if it sent one."""
    length_digest: bytes | None = None
    """The same of the trainer's length that a barrier let through last; another may be asked about meanwhile."""
    not_its_tokens: tuple[int, bytes] | None = None
    """(num_tokens, digest) that a barrier proved to be of another request: it settles nothing here."""
    settled_at: float = 0.0
    missing: tuple[Range, ...] = ()
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=STORY_EVENTS))

    @property
    def takes_rows(self) -> bool:
        """Whether a row may still change what this life serves."""
        return self.state is State.OPEN or self.state is State.INCOMPLETE

    def note(self, now: float, text: str) -> None:
        """Add to the story."""
        self.events.append((now, text))
