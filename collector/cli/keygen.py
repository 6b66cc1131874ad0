"""`r3-collector keygen`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import zmq

from protocol.keys import COLLECTOR, ROLES, write_folders


def keygen(
    folder: Annotated[Path, typer.Argument(help="Where to make the folders collector, engine and trainer.")],
) -> None:
    """Make keys for a collector that other machines reach: one folder each for it, its engines and its trainers.

    Copy each folder to where its party runs. An engine's key cannot read, a trainer's cannot feed.
    """
    made = write_folders(folder, {name: zmq.curve_keypair() for name in (COLLECTOR, *ROLES)})
    for path, use in zip(made, ("serve --keys", "capture_routes(…, keys=…)", "RouteClient(…, keys=…)"), strict=True):
        typer.echo(f"{path}  for {use}")
