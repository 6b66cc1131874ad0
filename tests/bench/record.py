"""A figure, its peers, its floor and its bar; as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement. peers: the same work by other means, in the same unit. floor: what no implementation can beat.
    bar: what is asked, in words; holds: whether it was met (True where nothing is asked)."""

    name: str
    unit: str
    ours: float
    peers: dict[str, float] = field(default_factory=dict)
    floor: float | None = None
    bar: str | None = None
    holds: bool = True


def write(records: list[Record], path: Path) -> None:
    """JSON, one object a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode([asdict(record) for record in records]), indent=2))


def show(records: list[Record]) -> None:
    """The table, and the verdict as the last line."""
    table = Table("name", "ours", "unit", "peers", "floor", "bar", "holds", box=None, header_style="bold")
    for record in records:
        peers = ", ".join(f"{name} {value:.4g}" for name, value in record.peers.items())
        floor = "" if record.floor is None else f"{record.floor:.4g}"
        verdict = "" if record.bar is None else "yes" if record.holds else "NO"
        table.add_row(record.name, f"{record.ours:.4g}", record.unit, peers, floor, record.bar or "", verdict)
    Console(width=170, highlight=False).print(table)
    asked = [record for record in records if record.bar is not None]
    print(f"bench: {sum(record.holds for record in asked)} of {len(asked)} hold", flush=True)
