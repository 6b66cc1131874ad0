"""What the long runs take on their command line."""

from __future__ import annotations

import secrets
import sys


def count_and_seed(default: int) -> tuple[int, int]:
    """`[COUNT] [SEED]`: how much, and the seed of everything, a new one where none is given."""
    given = [int(word) for word in sys.argv[1:3]]
    return given[0] if given else default, given[1] if len(given) > 1 else secrets.randbelow(2**31)
