"""Which life a request of the engine is in, and under which name the client knows it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from transformers.generation.continuous_batching.requests import RequestStatus

from protocol.ids import safe_id, sibling_id

_REMEMBERED: Final = 100_000
"""Names of siblings that `client_id` still knows, also after their end."""


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


class Lives:
    """Lives by the engine's request id. A soft reset keeps the life; an id used again after its end is a new one."""

    def __init__(self, serial: Iterator[int]) -> None:
        self._serial = serial
        self._lives: dict[str, Life] = {}
        self._children: set[str] = set()
        self._named: OrderedDict[str, str] = OrderedDict()

    def of(self, state: Any) -> Life:
        """The life of a `RequestState`, made when it is first seen."""
        life = self._lives.get(state.request_id)
        if life is not None and life.state is not state and life.state.status < RequestStatus.FINISHED:
            life.doubled = True  # an id used again while it runs: the engine itself mixes their caches
        if life is not None:
            life.state = state
        if life is None:
            forked = state.request_id in self._children
            life = self._lives[state.request_id] = Life(
                str(next(self._serial)), self._name(state), state, forked=forked
            )
        return life

    def client_id(self, request_id: str) -> str:
        """The name that routes of the engine's `request_id` are collected under."""
        return self._named.get(request_id) or safe_id(request_id)

    def find(self, request_id: str) -> Life | None:
        """The life of an engine's request id, or None."""
        return self._lives.get(request_id)

    def end(self, request_id: str) -> Life | None:
        """The request is over: its id may come again, as another life."""
        return self._lives.pop(request_id, None)

    def _name(self, state: Any) -> str:
        request_id, children = state.request_id, state.num_children
        if children > 0:
            # The engine names children itself, at the fork: they are recognised by what it will call them, never by
            # taking apart an id, which a client may have chosen.
            for i in range(children):
                child = f"{request_id}__child#{i}"
                self._children.add(child)
                self._remember(child, sibling_id(request_id, i + 1))
            self._remember(request_id, sibling_id(request_id, 0))
        elif request_id in self._children:
            self._children.discard(request_id)
        else:
            self._named.pop(request_id, None)
        return self.client_id(request_id)

    def _remember(self, request_id: str, name: str) -> None:
        self._named[request_id] = name
        self._named.move_to_end(request_id)
        while len(self._named) > _REMEMBERED:
            self._named.popitem(last=False)
