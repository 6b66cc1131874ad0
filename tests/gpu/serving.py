"""Transformers continuous batching with CUDA graphs, capture off and on in pairs, a model of Qwen3-30B-A3B's geometry.

`python3 -m tests.gpu.serving --out FILE [--cases 64,256,16] [--pairs 3]`; `--tiny` runs the same on a CPU in seconds.
One process, one set of weights; cache and graphs are made anew for each run. Every result is a JSON line at once, and
FILE is written again after every run, so a run that is cut off leaves what it measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.bench.record import Record
from tests.gpu import paged, results, varlen
from tests.gpu.serving_run import Bench, run_case
from tests.gpu.serving_summary import order, summary
from tests.gpu.steps import counted_graphs
from tests.gpu.workload import FULL, TINY, Case, build_model
from tests.harness.daemon import running_daemon

MODULE = "tests.gpu.serving"
FIRST_PAIR_S = 40.0
"""What a case's first pair is taken to need on a GPU."""


class Report:
    """Runs and records so far, on disk after each."""

    def __init__(self, path: str) -> None:
        self.runs: list[dict[str, Any]] = []
        self.cases: dict[str, list[Record]] = {}
        self.notes: list[str] = []
        self._path = path

    def run(self, found: dict[str, Any]) -> None:
        self.runs.append(found)
        shown = {key: value for key, value in found.items() if key != "decode_steps_ms"}
        results.say("run", shown)
        self.save()

    @property
    def records(self) -> list[Record]:
        return [record for records in self.cases.values() for record in records]

    def note(self, text: str) -> None:
        self.notes.append(text)
        results.say("note", {"text": text})
        self.save()

    def save(self) -> None:
        results.write(self._path, MODULE, self.records, notes=self.notes, runs=self.runs)


def main() -> None:
    """Run what is asked. Exit code 1 if a bar does not hold or a case broke."""
    options = _options()
    report = Report(options.out)
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    if device == "cpu" and not options.tiny:
        raise SystemExit("no CUDA device: pass --tiny to run the logic on a CPU")
    scale = TINY if options.tiny else FULL
    attention = varlen.register()
    report.note(f"{attention} differs from plain attention by {varlen.check(device):.2g} at most")
    if options.path == "paged":
        report.note(f"decode attention differs from plain attention by {paged.check(device):.2g} at most")
    model = build_model(scale, attention, device, torch.bfloat16 if device == "cuda" else torch.float32, options.seed)
    report.note(f"{model.num_parameters() / 1e9:.2f} billion parameters after {time.monotonic() - started:.0f} s")
    failed = False
    with (
        tempfile.TemporaryDirectory(prefix="r3-gpu-") as folder,
        running_daemon(Path(folder), budget="4GiB" if device == "cuda" else "256MiB") as daemon,
        counted_graphs() as graphs,
    ):
        bench = Bench(
            model,
            scale,
            daemon,
            graphs,
            use_graphs=device == "cuda" and bool(options.graphs),
            paged=options.path == "paged",
            overlap=bool(options.overlap),
            warm=bool(options.warm),
            seed=options.seed,
            window_bytes=options.window_mib << 20,
        )
        ends = started + options.budget_s
        for number in options.cases:
            case = scale.cases[number]
            if options.waves:
                case = Case(case.concurrency, case.prompt, case.new, options.waves)
            try:
                _pairs(bench, case, options.pairs, ends, report)
            except Exception as error:
                failed = True
                traceback.print_exc()
                report.note(f"{case.name} broke: {type(error).__name__}: {error}")
    for record in report.records:
        results.say("record", {"name": record.name, "ours": record.ours, "peers": record.peers, "holds": record.holds})
    asked = [record for record in report.records if record.bar is not None]
    results.say("summary", {"hold": sum(r.holds for r in asked), "asked": len(asked), "notes": report.notes})
    report.save()
    sys.stdout.flush()
    sys.exit(1 if failed or not all(record.holds for record in asked) else 0)


def _pairs(bench: Bench, case: Case, pairs: int, ends: float, report: Report) -> None:
    """Off and on in turn; no pair is begun that is not expected to end in time."""
    done: list[tuple[dict[str, Any], dict[str, Any]]] = []
    took = FIRST_PAIR_S if bench.use_graphs else 0.0
    for pair in range(pairs):
        began = time.monotonic()
        if began + took > ends:
            report.note(f"{case.name}: {pairs - pair} of {pairs} pairs left out, {ends - began:.0f} s were left")
            break
        runs: dict[bool, dict[str, Any]] = {}
        for on in order(pair):
            runs[on] = run_case(bench, case, on, pair)
            report.run(runs[on])
        done.append((runs[False], runs[True]))
        took = max(took, time.monotonic() - began)
        report.cases[case.name] = summary(case.name, done, bench.use_graphs)
        report.save()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build/gpu/serving.json")
    parser.add_argument("--cases", default="64,256,16", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--pairs", default=3, type=int)
    parser.add_argument("--waves", default=0, type=int, help="waves a run; 0: what the case says")
    parser.add_argument("--warm", default=1, type=int, choices=(0, 1), help="a short wave first captures the graphs")
    parser.add_argument("--async", dest="overlap", default=0, type=int, choices=(0, 1), help="async batching")
    parser.add_argument(
        "--path", default="varlen", choices=("varlen", "paged"), help="decode by gathered indices, or by block table"
    )
    parser.add_argument("--graphs", default=1, type=int, choices=(0, 1))
    parser.add_argument("--budget-s", default=560.0, type=float, help="no pair begins that would end later than this")
    parser.add_argument("--window-mib", default=256, type=int)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--seed", default=int(os.environ.get("R3_SEED", "20")), type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
