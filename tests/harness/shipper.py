"""A real shipper, started, and at the end closed with everything acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine_side.shipping.shipper import Shipper
from tests.harness.patches import SMALL


@contextmanager
def running_shipper(endpoint: str, timeout: float = 30.0) -> Iterator[Shipper]:
    """Ships rows of SMALL to `endpoint` for the block."""
    shipper = Shipper(endpoint, SMALL, "engine")
    shipper.start()
    try:
        yield shipper
    finally:
        assert shipper.close(timeout)
