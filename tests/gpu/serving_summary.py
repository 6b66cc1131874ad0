"""Runs in pairs, off and on, to one record a figure."""

from __future__ import annotations

from itertools import combinations
from statistics import median
from typing import Any

from tests.bench.record import Record

BAR = 0.995
STEPS = 200
FIGURES = {
    "tokens_per_s": "output tokens/s",
    "ttft_mean_ms": "ms",
    "tpot_mean_ms": "ms",
    "tpot_p99_ms": "ms",
    "decode_step_ms": "ms",
}


def order(pair: int) -> tuple[bool, bool]:
    """Capture off or on, first and second: off, on, on, off, off, on, so that drift falls on both alike."""
    return (False, True) if pair % 2 == 0 else (True, False)


def summary(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]], graphs: bool) -> list[Record]:
    """pairs: (off, on) of each pair that was run. graphs: they were asked for; without them no speed is judged."""
    off, on = [a for a, _ in pairs], [b for _, b in pairs]
    records = [
        Record(f"{name}/{key}", unit, _median(on, key), {"capture off": _median(off, key)})
        for key, unit in FIGURES.items()
        if all(run[key] is not None for run in (*off, *on))
    ]
    if not all(run["decode_steps"] for run in (*off, *on)):
        return [*records, Record(f"{name}/decode-step-ratio", "off/on", 0.0, bar="decode steps were seen", holds=False)]
    ratios = [a["decode_step_ms"] / b["decode_step_ms"] for a, b in pairs]
    ratio, spread = median(ratios), _spread([run["decode_step_ms"] for run in off])
    steps = min(sum(run["decode_steps"] for run in runs) for runs in (off, on))
    lowest = min(BAR, 1.0 - spread)
    bar = f"at least {lowest:.4f} (99.5 %, or 1 - the off/off spread where that is wider), {STEPS} steps of each"
    records.append(
        Record(
            f"{name}/decode-step-ratio",
            "off/on, median of pairs",
            ratio,
            {f"pair {i}": each for i, each in enumerate(ratios)} | {"off/off spread": spread, "steps": float(steps)},
            None,
            bar if graphs else None,
            not graphs or (ratio >= lowest and steps >= STEPS),
        )
    )
    rates = [b["tokens_per_s"] / a["tokens_per_s"] for a, b in pairs]
    records.append(Record(f"{name}/throughput-ratio", "on/off, median of pairs", median(rates), _numbered(rates)))
    if graphs:
        replayed = min(run["steps_replayed"] / max(1, run["steps"]) for run in (*off, *on))
        records.append(
            Record(
                f"{name}/steps-replayed",
                "share of steps that replayed a CUDA graph, the lowest run",
                replayed,
                {"replays": float(sum(run["graph_replays"] for run in (*off, *on)))},
                None,
                "at least 0.8",
                replayed >= 0.8,
            )
        )
    lost = sum(run["stats"]["rows_lost"] + run["stats"]["errors"] for run in on)
    shipped = sum(run["stats"]["rows"] for run in on)
    whole = lost == 0 and shipped > 0 and all(run["drained"] and run["pulled"] for run in on)
    records.append(
        Record(
            f"{name}/rows-lost",
            "rows",
            float(lost),
            {"rows shipped": float(shipped)},
            0.0,
            "none, and every request that was pulled was complete",
            whole,
        )
    )
    return records


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return float(median(run[key] for run in runs))


def _spread(values: list[float]) -> float:
    """How far apart the same work was, as a fraction: the widest of all pairs."""
    return max((max(a, b) / min(a, b) - 1.0 for a, b in combinations(values, 2)), default=0.0)


def _numbered(values: list[float]) -> dict[str, float]:
    return {f"pair {i}": value for i, value in enumerate(values)}
