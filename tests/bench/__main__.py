"""`python -m tests.bench [PREFIX …]`: the records whose module serves a name that begins so; all by default."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.bench import assembly, handoff, path, recovery, release
from tests.bench.record import Record, show, write

MODULES = {
    "assembly/": assembly.run,
    "handoff/": handoff.run,
    "path/": path.run,
    "recovery/": recovery.run,
    "release/": release.run,
}
OUTPUT = Path("build/bench.json")


def main() -> None:
    """Run, print, write build/bench.json."""
    seed = int(os.environ.get("R3_SEED", "20"))
    prefixes = sys.argv[1:] or list(MODULES)
    records: list[Record] = []
    for name, run in MODULES.items():
        if any(name.startswith(prefix) or prefix.startswith(name) for prefix in prefixes):
            records.extend(run(seed))
    write(records, OUTPUT)
    show(records)


if __name__ == "__main__":
    main()
