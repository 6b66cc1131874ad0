"""Which life a request of the engine is in, and under which name the client knows it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from transformers.generation.continuous_batching.requests import RequestStatus

from protocol.ids import safe_id, sibling_id

_REMEMBERED: Final = 100_000
"""Names of siblings that are still known after their end."""


@dataclass(slots=True, eq=False)
class Life:
    """One run of one request. next: the position its next forward starts at if it is not preempted. forked: it began
    as a copy of its parent's cache."""

    life_id: str
    name: str
    state: Any
    opened: bool = False
    next: int = 0
    forked: bool = False
    doubled: bool = False


class Names:
    """Names that routes are collected under, of every run of a capture: bounded, so that it may run for weeks."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, str] = OrderedDict()
        self._children: set[str] = set()

    def of(self, request_id: str) -> str:
        """The name of an engine's request id, also after its end."""
        return self._named.get(request_id) or safe_id(request_id)

    def take(self, state: Any) -> tuple[str, bool]:
        """(name, whether it is a fork) of a `RequestState` that is seen for the first time."""
        request_id, children = state.request_id, state.num_children
        forked = request_id in self._children
        if children > 0:
            # The engine names children itself, at the fork: they are recognised by what it will call them, never by
            # taking apart an id, which a client may have chosen.
            for i in range(children):
                self._children.add(child := f"{request_id}__child#{i}")
                self._remember(child, sibling_id(request_id, i + 1))
            self._remember(request_id, sibling_id(request_id, 0))
        elif not forked:
            self._named.pop(request_id, None)
        self._children.discard(request_id)
        return self.of(request_id), forked

    def _remember(self, request_id: str, name: str) -> None:
        self._named[request_id] = name
        self._named.move_to_end(request_id)
        while len(self._named) > _REMEMBERED:
            self._children.discard(self._named.popitem(last=False)[0])


class Lives:
    """Lives of one processor by the engine's request id. A soft reset keeps the life; an id used again after its end is
    a new one. serial: numbers for life ids, unique per capture."""

    def __init__(self, serial: Iterator[int], names: Names) -> None:
        self._serial = serial
        self._names = names
        self._lives: dict[str, Life] = {}

    def of(self, state: Any) -> Life:
        """The life of a `RequestState`, made when it is first seen."""
        life = self._lives.get(state.request_id)
        if life is None:
            name, forked = self._names.take(state)
            life = self._lives[state.request_id] = Life(str(next(self._serial)), name, state, forked=forked)
        elif life.state is not state:
            # A soft reset finished the old state first; otherwise the id is used again while it runs, and the engine
            # itself mixes the two caches.
            life.doubled |= life.state.status < RequestStatus.FINISHED
            life.state = state
        return life

    def find(self, request_id: str) -> Life | None:
        """The life of an engine's request id, or None."""
        return self._lives.get(request_id)

    def end(self, request_id: str) -> Life | None:
        """The request is over: its id may come again, as another life."""
        return self._lives.pop(request_id, None)
