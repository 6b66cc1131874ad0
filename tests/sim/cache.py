"""A paged KV cache with prefix sharing, and the rows of its slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tests.sim.facts import RowFact

BLOCK = 2
UNPROVEN = 8


@dataclass(slots=True, frozen=True)
class Stored:
    """What a slot holds: a row, the token and position it was computed for, the step that wrote it."""

    row: int
    fact: RowFact
    position: int
    step: int


class Cache:
    """Blocks are shared by hash of all tokens up to their end, as soon as the step that fills them is scheduled, and
    reused oldest first once nobody refers to them."""

    def __init__(self, blocks: int) -> None:
        self._free = deque(range(blocks))
        self._users = [0] * blocks
        self._by_hash: dict[tuple[int, ...], int] = {}
        self._hash_of: dict[int, tuple[int, ...]] = {}
        self._slots: dict[int, Stored] = {}

    def hit(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that hold the longest known prefix, short of the last token; they are the caller's now."""
        found: list[int] = []
        for i in range((len(tokens) - 1) // BLOCK):
            block = self._by_hash.get(tuple(tokens[: (i + 1) * BLOCK]))
            if block is None:
                break
            found.append(block)
        for block in found:
            if not self._users[block]:
                self._free.remove(block)
            self._users[block] += 1
        return found

    def extend(self, blocks: list[int], end: int) -> bool:
        """Add blocks until `end` positions fit. False when none is left."""
        while len(blocks) * BLOCK < end:
            if not self._free:
                return False
            block = self._free.popleft()
            known = self._hash_of.pop(block, None)
            if known is not None and self._by_hash.get(known) == block:
                del self._by_hash[known]
            self._users[block] = 1
            blocks.append(block)
        return True

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; what they hold can still be hit until they are reused."""
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        blocks.clear()

    def publish(self, tokens: Sequence[int], blocks: list[int], end: int) -> None:
        """Let others hit the full blocks below `end`."""
        for i in range(min(end, len(tokens)) // BLOCK):
            key = tuple(tokens[: (i + 1) * BLOCK])
            if key not in self._by_hash and blocks[i] not in self._hash_of:
                self._by_hash[key] = blocks[i]
                self._hash_of[blocks[i]] = key

    def write(self, slot: int, stored: Stored) -> None:
        """A forward computed this slot."""
        self._slots[slot] = stored

    def at(self, slot: int) -> Stored:
        """What a slot holds."""
        return self._slots[slot]

    def proves(self, stored: Stored, token: int, position: int, step: int) -> bool:
        """The rule of reading back: the same token at the same position, written no later than `step`."""
        return stored.fact.token == token and stored.position == position and stored.step <= step


def slots_of(blocks: Sequence[int], count: int) -> list[int]:
    """Slots of positions [0, count)."""
    return [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(count)]
