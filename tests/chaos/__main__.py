"""`python -m tests.chaos [KILLS] [SEED]`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.play import History, play
from tests.harness.arguments import count_and_seed

PACE = 0.8
"""Of the steps that an engine should have done in the time."""


def verdict(history: History, kills: int) -> list[str]:
    """What was not as promised."""
    said = [f"{name}: {what}" for name, what in history.wrong.items()]
    if history.served != history.requests:
        said.append(f"{history.requests - history.served} of {history.requests} requests not served whole")
    if len(history.kills) != kills or not all(history.kills):
        said.append("a kill found no traffic")
    for engine in history.engines:
        if not engine["drained"] or engine["rows_dropped"]:
            said.append(f"an engine lost rows: {engine}")
        if engine["pace"] < PACE:
            said.append(f"an engine was held: {engine}")
    return said


def main() -> int:
    kills, seed = count_and_seed(200)
    print(f"seed {seed}: {kills} kills", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="r3-chaos-") as folder:
        history = play(Path(folder), seed, kills)
    print(
        f"{len(history.kills)} kills in {time.monotonic() - began:.0f} s; patches applied before each: {history.kills}"
    )
    for engine in history.engines:
        print(f"engine: {engine}")
    print(f"{history.served} of {history.requests} requests whole; {history.unanswered} asks without an answer")
    said = verdict(history, kills)
    print("\n".join(said) or "ok: nothing that was acknowledged is lost, nothing is wrong")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
