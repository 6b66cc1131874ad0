"""What a capture saw and shipped."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from engine_side.shipping.shipper import ShipperStats


@dataclass(slots=True)
class CaptureStats:
    """Counters since the capture began. rows = forward_rows (run by a forward) + cached_rows (from the slot store,
    forked_rows of them for a fork's copied prefix). errors: steps whose rows had to be declared lost, and those of
    the shipper. bytes, patches, rows_lost: as shipped; rows_repaired of those lost came after all."""

    steps: int = 0
    rows: int = 0
    forward_rows: int = 0
    cached_rows: int = 0
    forked_rows: int = 0
    preemptions: int = 0
    chunked_prefills: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    errors: int = 0
    patches: int = 0
    bytes: int = 0
    rows_lost: int = 0
    rows_repaired: int = 0

    def with_shipper(self, shipper: ShipperStats) -> CaptureStats:
        """A copy with the shipper's counters in it."""
        return replace(
            self,
            errors=self.errors + shipper.errors,
            patches=shipper.patches,
            bytes=shipper.bytes,
            rows_lost=shipper.rows_lost,
            rows_repaired=shipper.rows_repaired,
        )

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return asdict(self)
