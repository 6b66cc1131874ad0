"""`r3-collector ls` and `show`: what is in flight, and one request's story."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from collector.client.client import RouteClient
from collector.core.life import State
from protocol.messages import Kind, LifeStory

Address = Annotated[
    str, typer.Option("--address", "-a", envvar="R3_COLLECTOR", help="The collector's trainer endpoint.")
]
Keys = Annotated[
    Path | None,
    typer.Option("--keys", "-k", envvar="R3_KEYS", help="A trainer's key folder, where it serves with keys."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]

_PATIENCE_S = 1.0
"""On top of the 2 s that an answer may take."""


def ls(
    state: Annotated[State | None, typer.Option(help="Only requests of this state.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many.", min=1, max=1000)] = 100,
    after: Annotated[int, typer.Option(help="Cursor of the page before.")] = 0,
    address: Address = "",
    keys: Keys = None,
    as_json: AsJson = False,
) -> None:
    """List requests, oldest first."""
    with RouteClient(address or None, timeout=_PATIENCE_S, keys=keys) as client:
        page = client.requests(state or "", after, limit)
    entries = [msgspec.structs.asdict(entry) for entry in page.entries]
    if as_json:
        typer.echo(msgspec.json.encode({"requests": entries, "next": page.next, "total": page.total}).decode())
        return
    table = Table("request", "engine", "state", "rows", "tokens", "age", box=None, header_style="bold")
    for entry in page.entries:
        tokens = "" if entry.num_tokens is None else str(entry.num_tokens)
        table.add_row(
            _plain(entry.request_id),
            _plain(entry.engine_id),
            entry.state,
            str(entry.rows),
            tokens,
            f"{entry.age_s:.1f}s",
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"{len(entries)} of {page.total}" + (f", more: --after {page.next}" if page.next else ""))


def show(
    request_id: Annotated[str, typer.Argument(help="The client's request id.")],
    address: Address = "",
    keys: Keys = None,
    as_json: AsJson = False,
) -> None:
    """Tell the story of one request: where its rows are, what is missing, what to do next."""
    with RouteClient(address or None, timeout=_PATIENCE_S, keys=keys) as client:
        lives = client.describe(request_id)
    if as_json:
        typer.echo(msgspec.json.encode({"lives": [msgspec.structs.asdict(life) for life in lives]}).decode())
    else:
        for life in lives:
            _print_story(life)
    if not lives:
        typer.echo(f"no request {request_id!r} here: it was never opened, or is released", err=True)
        raise typer.Exit(1)


def _print_story(life: LifeStory) -> None:
    console = Console(markup=False, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    provenance = ", ".join(f"[{a}, {b}) {Kind(kind).name.lower()}" for a, b, kind in life.provenance[:12])
    for key, value in (
        ("request", _plain(life.request_id)),
        ("engine", f"{_plain(life.engine_id)} (life {_plain(life.life)} of {_plain(life.incarnation)})"),
        ("state", life.state + (f": {_plain(life.reason)}" if life.reason else "")),
        ("tokens", "not known yet" if life.num_tokens is None else str(life.num_tokens)),
        ("rows", f"{life.rows} held, up to position {life.end}"),
        ("missing", ", ".join(f"[{a}, {b})" for a, b in life.missing[:12]) or "none"),
        ("weights", ", ".join(f"[{a}, {b}) v{v}" for a, b, v in life.weight_spans[:12])),
        ("rows from", provenance),
        ("age", f"{life.age_s:.1f} s"),
        ("next", life.advice),
    ):
        table.add_row(key, value)
    console.print(table)
    for ago, text in life.events:
        console.print(f"  {ago:8.1f} s ago  {_plain(text)}")


def _plain(text: str) -> str:
    """A peer's text without control characters: a request id must not drive somebody's terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
