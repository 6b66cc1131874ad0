"""Stable words of a `Problem`: clients turn each into a typed error."""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = "unknown"
RELEASED: Final = "released"
NOT_READY: Final = "not_ready"
INCOMPLETE: Final = "incomplete"
ABORTED: Final = "aborted"
LOST: Final = "lost"
FAILED: Final = "failed"
AMBIGUOUS: Final = "ambiguous"
WRONG_TOKENS: Final = "wrong_tokens"
LENGTH_MISMATCH: Final = "length_mismatch"
TOO_LARGE: Final = "too_large"
TOO_MANY: Final = "too_many"
BAD_REQUEST: Final = "bad_request"
INTERNAL: Final = "internal"
SHUTTING_DOWN: Final = "shutting_down"
