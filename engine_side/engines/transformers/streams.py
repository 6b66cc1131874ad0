"""Order between an engine's streams, kept on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on `stream`, and have what the entering stream does afterwards wait for it. None, as on a CPU: nothing."""
    if stream is None:
        yield
        return
    outer = torch.cuda.current_stream(stream.device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)
