"""The start-up canary: proof that every way the engine executes reports every MoE layer.

Static checks see modules, not kernels. A fused, monolithic or quantised path that routes inside a kernel leaves its
modules where they were and calls none of them, often at one batch size only. So each way runs once, over rows that were
poisoned before, and what it committed is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_side.capture.errors import CaptureRefused
from engine_side.capture.records import OUT_OF_RANGE, UNCAPTURED_LAYER
from protocol.geometry import UNCAPTURED, WIRE_UNCAPTURED_U8, Geometry

POISON = 0x80
"""Status bit of a row that no commit has written since it was poisoned."""

_WAY_OUT = (
    "Turn off there what routes without calling the router modules or renumbers their ids (fused, monolithic or "
    "quantised expert kernels), and install capture after the weights are loaded and before compile and graph capture; "
    "or run without capture."
)


class CommittedRows(Protocol):
    """What a commit left, as views that may be written. rows: int16 or uint8 [T, moe_layers, top_k]; status: uint8
    [T]."""

    @property
    def rows(self) -> Tensor: ...

    @property
    def status(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Way:
    """One way the engine executes, such as a prefill, the decode of one token, or one captured graph.

    run: does one dummy forward of `num_tokens` tokens under capture and returns the committed rows, or None where no
    commit ran. poison: called before it; a way that writes rows into buffers of its own fills them with `poison`, so
    that a commit that never runs cannot pass with what lay there. Both leave their work on the current stream.
    """

    name: str
    num_tokens: int
    run: Callable[[], CommittedRows | None]
    poison: Callable[[], None] | None = None


def prove_coverage(geometry: Geometry, ways: Sequence[Way]) -> None:
    """Run every way once. Raises one CaptureRefused that names each way that failed, its layers by global id, and the
    way out: a layer that did not report, an expert chosen twice or outside [0, num_experts), rows that are not
    `num_tokens`, a commit that did not run, an exception of the way itself. Also raises it where `ways` is empty."""
    failed: list[str] = []
    cause: Exception | None = None
    for way in ways:
        try:
            faults = _faults(geometry, way)
        except Exception as error:
            cause = cause or error
            faults = [f"{type(error).__name__}: {error}"]
        if faults:
            failed.append(f"  {way.name}: {'; '.join(faults)}")
    if not ways:
        raise CaptureRefused("no way of executing was run: nothing shows that routes are captured")
    if failed:
        summary = f"routes are not captured in {len(failed)} of {len(ways)} ways the engine executes"
        raise CaptureRefused("\n".join([f"{summary}:", *failed, _WAY_OUT])) from cause


def poison(step: CommittedRows) -> None:
    """Overwrite committed rows in place, wherever they lie: ids uncaptured, status POISON."""
    with torch.inference_mode():  # the only mode that may write to tensors of either mode
        step.rows.fill_(WIRE_UNCAPTURED_U8 if step.rows.dtype == torch.uint8 else UNCAPTURED)
        step.status.fill_(POISON)


def uncaptured_mask(rows: Tensor) -> Tensor:
    """Which ids are missing: bool of the shape of `rows`. rows: int16, where -1 is missing, or uint8, where 255 is."""
    return rows == (WIRE_UNCAPTURED_U8 if rows.dtype == torch.uint8 else UNCAPTURED)


def _faults(geometry: Geometry, way: Way) -> list[str]:
    if way.num_tokens < 1:
        return [f"{way.num_tokens} tokens prove nothing"]
    if way.poison is not None:
        way.poison()
    step = way.run()
    if step is None:
        return ["the commit did not run"]
    rows, status = step.rows.to("cpu", copy=True), step.status.to("cpu", copy=True)
    # Engines commit into the same rows again and again: a later way that commits nothing must not show these.
    poison(step)
    if rows.shape[1:] != geometry.row_shape:
        return [f"rows of shape {list(rows.shape[1:])}, expected {list(geometry.row_shape)}"]
    if not len(rows) == len(status) == way.num_tokens:
        return [f"{len(rows)} rows and {len(status)} statuses for {way.num_tokens} tokens"]
    poisoned = (status & POISON) != 0
    if poisoned.all():
        return ["the commit did not run"]
    faults = [f"{_numbered('row', _where(poisoned))} not committed"] if poisoned.any() else []
    return faults + _wrong(geometry, rows[~poisoned], status[~poisoned])


def _wrong(geometry: Geometry, rows: Tensor, status: Tensor) -> list[str]:
    """What is wrong with rows [T, moe_layers, top_k] and their status [T]."""
    missing = uncaptured_mask(rows)
    ids = rows.to(torch.int32).masked_fill(missing, UNCAPTURED)
    ordered = ids.sort(dim=-1).values
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != UNCAPTURED)).any(-1)
    # An id out of range is committed as a missing one, and only the row's status tells them apart. Where a row has
    # both, a layer without any id is the one that did not report.
    says_silent, says_outside = ((status & bit) != 0 for bit in (UNCAPTURED_LAYER, OUT_OF_RANGE))
    outside = missing.any(-1) & says_outside[:, None] & ~(missing.all(-1) & says_silent[:, None])
    silent = missing.any(-1) & ~outside
    outside |= (~missing & ((ids < 0) | (ids >= geometry.num_experts))).any(-1)
    faults = [
        f"{_numbered('layer', (geometry.moe_layer_ids[at] for at in _where(layers.any(0))))} {what}"
        for layers, what in (
            (silent, "did not report"),
            (twice, "chose an expert twice"),
            (outside, f"chose experts outside [0, {geometry.num_experts})"),
        )
        if layers.any()
    ]
    # Never trust rows that look clean against a status that says they are not.
    unexplained = (status != 0) & ~(silent | twice | outside).any(1)
    if unexplained.any():
        bits = ", ".join(f"0x{bits:02x}" for bits in sorted(set(status[unexplained].tolist())))
        faults.append(f"{_numbered('row', _where(unexplained))} of status {bits}")
    return faults


def _where(mask: Tensor) -> list[int]:
    return [int(at) for at in mask.nonzero().flatten()]


def _numbered(noun: str, numbers: Iterable[int]) -> str:
    """`layer 3`, or `layers 0, 3-60`. numbers: ascending."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    plural = "s" if len(runs) > 1 or len(runs[0]) > 1 else ""
    return f"{noun}{plural} {', '.join('-'.join(map(str, run)) for run in runs)}"
