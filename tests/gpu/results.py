"""What every part run on a GPU writes: its records, and what is needed to read and repeat them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "triton", "numpy", "pyzmq", "msgspec")


def envelope(module: str, records: Iterable[Any], **more: Any) -> dict[str, Any]:
    """{command, date, card, versions, records} of a run of `python3 -m module`. records: mappings or dataclasses, of
    the fields of `tests.bench.record.Record` at least. more: further keys."""
    return {
        "command": " ".join(["python3", "-m", module, *_asked(sys.argv[1:])]),
        "date": date.today().isoformat(),
        "card": card(),
        "versions": versions(),
        "records": [_plain(each) for each in records],
        **more,
    }


def write(path: str | Path, module: str, records: Iterable[Any], **more: Any) -> None:
    """Write the envelope to `path`; an earlier one is replaced in one piece."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(json.dumps(envelope(module, records, **more), indent=2, default=str) + "\n")
    partial.replace(target)


def say(kind: str, fields: Mapping[str, Any]) -> None:
    """One JSON line on stdout, at once."""
    print(json.dumps({"kind": kind, **fields}, default=str), flush=True)


def card() -> str:
    """The accelerator's name, or the processor's."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"none ({platform.machine()})"


def versions() -> dict[str, str]:
    """Of what is installed here."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES[1:]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _asked(arguments: list[str]) -> list[str]:
    """Without `--out PATH`, which changes no figure and names a folder of somebody's machine."""
    at = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:at] + arguments[at + 2 :]


def _plain(record: Any) -> dict[str, Any]:
    return asdict(record) if is_dataclass(record) and not isinstance(record, type) else dict(record)
