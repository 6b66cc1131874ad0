"""What the demo's engine is asked: enough concurrency for a small cache to run out, prefixes to share, siblings."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import sibling_id
from tests.harness.tiny import prompts

PAGE_SIZE = 32
SIBLINGS = 4
GROUPS = 6
CANCELLED = 2
REQUESTS = 64
"""Sequences: GROUPS x SIBLINGS siblings, the rest on their own, CANCELLED of them cancelled while they run."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. names: the request ids its sequences are collected under. cancel_after: generated tokens, or 0."""

    request_id: str
    prompt: list[int]
    new_tokens: int
    group: bool
    cancel_after: int

    @property
    def names(self) -> list[str]:
        return [sibling_id(self.request_id, i) for i in range(SIBLINGS)] if self.group else [self.request_id]


def workload(prefix: str, seed: int) -> list[Request]:
    """REQUESTS sequences over prompts of shared prefixes; ids begin with `prefix`."""
    singles = REQUESTS - GROUPS * SIBLINGS
    texts = prompts(GROUPS + singles, seed, families=4, shared=(70, 200), own=(8, 80))
    made = []
    for i, text in enumerate(texts):
        cancel = 6 + i if GROUPS <= i < GROUPS + CANCELLED else 0
        made.append(Request(f"{prefix}-{i:02d}", text, 40 + (i * 11) % 50, i < GROUPS, cancel))
    return made
