"""Names of requests: siblings of one prompt are `<id>#<i>`, so `#` and `%` in a client's id are escaped."""

from __future__ import annotations

import hashlib

from protocol.limits import MAX_ID_CHARS


def escape(client_id: str) -> str:
    """The client's id with `%` and `#` percent-encoded; ids without them are unchanged."""
    return client_id.replace("%", "%25").replace("#", "%23")


def sibling_id(client_id: str, index: int) -> str:
    """Request id of sibling `index` (0-based) of a client's request with n > 1."""
    return f"{safe_id(client_id)}#{index}"


def safe_id(request_id: object) -> str:
    """The name of a request without siblings: escaped, and what cannot be an id on the wire replaced by a digest."""
    text = escape(str(request_id)).encode("utf-8", "backslashreplace").decode()
    # Room for a sibling's `#i`.
    if 0 < len(text) <= MAX_ID_CHARS - 12:
        return text
    return f"{text[:64]}%{hashlib.sha256(text.encode()).hexdigest()[:16]}"
