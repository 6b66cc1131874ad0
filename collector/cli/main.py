"""The commands. Each lives in its own module; this one only gathers them and turns typed errors into exit codes."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from collector.cli import inspect, keygen, serve
from protocol.errors import R3Error

app = typer.Typer(
    name="r3-collector",
    help="Collects the routed experts of RL rollouts and serves them to trainers.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("keygen")(keygen.keygen)
app.command("ls")(inspect.ls)
app.command("show")(inspect.show)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 a typed error (printed to stderr), 2 wrong usage."""
    try:
        app()
    except R3Error as error:
        Console(stderr=True, highlight=False).print(f"r3-collector: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
