"""`python -m tests.soak [SECONDS] [SEED]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.harness.arguments import count_and_seed
from tests.soak.play import BOUND, LEFT, Soak, soak


def verdict(found: Soak) -> list[str]:
    """What was not as promised."""
    said = list(found.wrong)
    if max(found.samples) > BOUND:
        said.append(f"{max(found.samples):,} bytes resident, at most {BOUND:,}")
    if found.after > found.floor + LEFT:
        said.append(f"{found.after:,} bytes resident after release, {found.floor:,} before")
    return said


def main() -> int:
    seconds, seed = count_and_seed(600)
    print(f"seed {seed}: {seconds} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="r3-soak-") as folder:
        found = soak(Path(folder), seed, seconds)
    mb = [f"{x / 1e6:.0f}" for x in (found.floor, max(found.samples), BOUND, found.after)]
    print(
        f"{found.requests} requests, {len(found.samples)} samples; MB resident: {mb[0]} before, {mb[1]} at most", end=""
    )
    print(f" (bound {mb[2]}), {mb[3]} after release")
    said = verdict(found)
    print("\n".join(said) or "ok")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
