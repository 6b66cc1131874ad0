"""`python -m tests.fuzz [FRAMES] [SEED]`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.inside import run_inside
from tests.fuzz.live import attack
from tests.harness.arguments import count_and_seed
from tests.harness.daemon import running_daemon

GROWTH = 50 << 20
RATE = 0.8


def main() -> int:
    count, seed = count_and_seed(1_000_000)
    print(f"seed {seed}: {count:,} messages, half in process, half through sockets", flush=True)
    began = time.monotonic()
    seen = run_inside(seed, count // 2)
    print(f"in process: {dict(seen)}, nothing raised, in {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="r3-fuzz-") as folder, running_daemon(Path(folder)) as daemon:
        found = attack(daemon, seed, count - count // 2)
    print(f"sockets: {found}, in {time.monotonic() - began:.0f} s")
    good = found.growth < GROWTH and found.beside > RATE * found.alone
    print("ok" if good else f"FAILED: at most {GROWTH} bytes of growth and {RATE:.0%} of the rate alone")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
