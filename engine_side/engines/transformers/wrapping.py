"""Replacing a method of one instance, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """While open, `owner.name` is `function`; the class and every other instance stay as they are."""
    before = vars(owner).get(name)
    object.__setattr__(owner, name, function)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)
