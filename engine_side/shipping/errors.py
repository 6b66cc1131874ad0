"""Why a shipper cannot be made."""

from __future__ import annotations

import re

from protocol.errors import R3Error

_ENDPOINT = re.compile(r"ipc:///.+|tcp://[^:/]+:\d{1,5}|tcp://\[[^]]+\]:\d{1,5}")


class BadEndpoint(R3Error):
    """The collector's address is none."""


def checked(endpoint: str) -> str:
    """Return `endpoint`, or raise BadEndpoint: a typing error must be heard at the call, not in a thread's log."""
    if not _ENDPOINT.fullmatch(endpoint):
        raise BadEndpoint(f"{endpoint!r} is no address: write ipc:///PATH or tcp://HOST:PORT, as `serve` prints it")
    return endpoint
