"""Names of requests: siblings of one prompt are `<id>#<i>`, so `#` and `%` in a client's id are escaped."""

from __future__ import annotations


def escape(client_id: str) -> str:
    """The client's id with `%` and `#` percent-encoded; ids without them are unchanged."""
    return client_id.replace("%", "%25").replace("#", "%23")


def sibling_id(client_id: str, index: int) -> str:
    """Request id of sibling `index` (0-based) of a client's request with n > 1."""
    return f"{escape(client_id)}#{index}"
