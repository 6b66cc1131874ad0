"""The demo's tables, and what it holds against itself."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from deploy.demo.figures import Run
from deploy.demo.workload import CANCELLED, GROUPS, REQUESTS, SIBLINGS

_MUST_HAPPEN = ("preemptions", "chunked_prefills", "cached_rows", "forked_rows", "cancelled")
"""A run in which one of these did not happen has not shown what it is for."""

_VERIFY = ("tokens", "kl", "k3", "abs_diff", "frac_abs_gt_0_1", "max_abs_diff")


def complaints(runs: Mapping[str, Run]) -> list[str]:
    """Everything that is not as it should be; empty when the demo is ok."""
    found = []
    for dtype, run in runs.items():
        engine, trainer = run.engine.counts, run.trainer.counts
        found += [f"{dtype}: {name} is 0, the run did not exercise it" for name in _MUST_HAPPEN if not engine[name]]
        expected = {
            "complete": REQUESTS - CANCELLED,
            "aborted": CANCELLED,
            "rows_missing": 0,
            "rows_compared": trainer["rows"],
            "rows_replayed": trainer["rows_installed"],
        }
        if dtype == "fp32":
            expected["rows_wrong"] = 0
        found += [f"{dtype}: {k} is {trainer[k]}, expected {v}" for k, v in expected.items() if trainer[k] != v]
        found += [f"{dtype}: engine {k} is {engine[k]}, expected 0" for k in ("errors", "rows_lost") if engine[k]]
    off, on = runs["bf16"].trainer.off, runs["bf16"].trainer.on
    found += [
        f"bf16: {name} did not fall with replay: {off[name]:.3g} to {on[name]:.3g}"
        for name in ("k3", "abs_diff", "max_abs_diff")
        if not on[name] < off[name]
    ]
    return found


def print_tables(console: Console, runs: Mapping[str, Run]) -> None:
    """Outcomes, then what replay does to the log-probabilities."""
    table = Table("", *runs, title="routes, engine to trainer", title_justify="left", box=None)
    for name, cells in _lines(runs):
        table.add_row(name, *cells, style="" if not name.startswith(" ") else "dim")
    console.print(table)
    verify = Table("bf16 engine, fp32 trainer", *_VERIFY, title="r3_verify (nats)", title_justify="left", box=None)
    for name, figures in (("replay off", runs["bf16"].trainer.off), ("replay on", runs["bf16"].trainer.on)):
        values = [figures[key] for key in _VERIFY]
        verify.add_row(name, *(str(x) if isinstance(x, int) else f"{x:.3g}" for x in values))
    console.print(verify)


def last_line(runs: Mapping[str, Run], ok: bool) -> str:
    """The verdict in one line. wrong counts rows of the fp32 engine."""
    trainers = [run.trainer.counts for run in runs.values()]
    replayed = sum(t["rows_replayed"] for t in trainers) / max(1, sum(t["rows_installed"] for t in trainers))
    return (
        f"demo: {'ok' if ok else 'FAILED'} requests={sum(t['complete'] + t['aborted'] for t in trainers)} "
        f"rows={sum(t['rows'] for t in trainers)} missing={sum(t['rows_missing'] for t in trainers)} "
        f"wrong={runs['fp32'].trainer.counts['rows_wrong']} replayed={replayed:.0%}"
    )


def _lines(runs: Mapping[str, Run]) -> list[tuple[str, list[str]]]:
    def each(of: object) -> list[str]:
        return [str(of(run)) for run in runs.values()]  # type: ignore[operator]

    return [
        ("requests complete", each(lambda r: r.trainer.counts["complete"])),
        ("requests cancelled, prefix served", each(lambda r: r.trainer.counts["aborted"])),
        (f"siblings ({GROUPS} prompts, n={SIBLINGS})", each(lambda r: GROUPS * SIBLINGS)),
        ("rows served", each(lambda r: r.trainer.counts["rows"])),
        ("rows missing", each(lambda r: r.trainer.counts["rows_missing"])),
        ("rows compared with a prefill", each(lambda r: r.trainer.counts["rows_compared"])),
        ("rows that differ (wrong in fp32)", each(lambda r: r.trainer.counts["rows_wrong"])),
        ("rows that differ by a rounding tie", each(lambda r: r.trainer.counts["rows_tied"])),
        ("(row, layer) cells that differ", each(lambda r: _share(r, "cells_differing", "cells"))),
        ("rows from prefix hits, served", each(lambda r: r.trainer.counts["rows_cached"])),
        ("preemptions", each(lambda r: r.engine.counts["preemptions"])),
        ("chunked prefills", each(lambda r: r.engine.counts["chunked_prefills"])),
        ("forked rows", each(lambda r: r.engine.counts["forked_rows"])),
        ("patches shipped", each(lambda r: r.engine.counts["patches"])),
        ("bytes shipped", each(lambda r: f"{r.engine.counts['bytes']:,}")),
        ("pulled", each(lambda r: f"{r.trainer.counts['bytes_pulled'] / r.trainer.pull_seconds / 1e6:.0f} MB/s")),
        ("engine seconds", each(lambda r: f"{r.engine.seconds:.1f}")),
    ]


def _share(run: Run, part: str, whole: str) -> str:
    counts = run.trainer.counts
    return f"{counts[part]} of {counts[whole]} ({counts[part] / counts[whole]:.2%})"
