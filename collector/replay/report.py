"""What a replay did, in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class ReplayReport:
    """Filled while the block runs; a checkpoint that recomputes after it closed still counts into `recomputes`.

    forwards: complete forwards that were proven. recomputes: router calls that a checkpoint repeated in a backward,
    each proven. rows_*: flat rows, summed over the forwards: replayed, or left to the native router because the row
    was declared missing, is a sequence's last token, or is padding. used, installed: (layer to rows) that the
    routers returned as installed, and that were installed.
    """

    forwards: int = 0
    recomputes: int = 0
    rows_replayed: int = 0
    rows_missing: int = 0
    rows_last: int = 0
    rows_padding: int = 0
    used: dict[int, int] = field(default_factory=dict)
    installed: dict[int, int] = field(default_factory=dict)

    @property
    def rows_native(self) -> int:
        """Rows that the native router chose for."""
        return self.rows_missing + self.rows_last + self.rows_padding

    @property
    def share(self) -> Mapping[int, float]:
        """Per layer: rows used as installed / rows installed. 1.0 throughout unless a forward raised."""
        return {layer: self.used[layer] / rows for layer, rows in self.installed.items() if rows}

    def __str__(self) -> str:
        worst = min(self.share.values(), default=1.0)
        return (
            f"forwards={self.forwards} recomputes={self.recomputes} rows_replayed={self.rows_replayed} "
            f"rows_native={self.rows_native} layers={len(self.installed)} used==installed={worst:.2%}"
        )
