"""What a mutant is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Change: TypeAlias = tuple[Any, str, Any]
"""(owner, attribute, what it becomes)."""
Mutants: TypeAlias = dict[str, Callable[[], list[Change]]]


def nothing(*_: Any, **__: Any) -> None:
    """In place of what a rule does."""
