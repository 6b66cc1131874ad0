"""Runs the demo: a daemon for all of it, an engine and a trainer per precision, a table, a verdict."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from collector.client import RouteClient
from deploy.demo.figures import EngineReport, Rollout, Run, TrainerReport
from deploy.demo.figures import Progress as Done
from deploy.demo.verdict import complaints, last_line, print_tables
from deploy.demo.workload import REQUESTS
from tests.harness.daemon import running_daemon

_LINE = msgspec.json.Decoder(Rollout | EngineReport | Done | TrainerReport)


def main() -> None:
    """Exit code 0 when every row was served and right."""
    ask = argparse.ArgumentParser()
    ask.add_argument("--seed", type=int, default=20)
    args = ask.parse_args()
    console = Console(highlight=False)
    console.print(f"seed {args.seed}; engine, collector and trainer are three processes")
    runs: dict[str, Run] = {}
    with (
        tempfile.TemporaryDirectory(prefix="r3-demo-") as folder,
        running_daemon(Path(folder), budget="256MiB") as daemon,
    ):
        bars = Progress(
            TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        with bars:
            for dtype in ("fp32", "bf16"):
                runs[dtype] = _run(dtype, args.seed, daemon.engines, daemon.trainers, bars)
    print_tables(console, runs)
    wrong = complaints(runs)
    for text in wrong:
        console.print(f"demo: {text}", style="red")
    print(last_line(runs, not wrong), flush=True)
    sys.exit(1 if wrong else 0)


def _run(dtype: str, seed: int, engines: str, trainers: str, bars: Progress) -> Run:
    rolled = bars.add_task(f"{dtype} engine: rollouts", total=REQUESTS)
    trained = bars.add_task(f"{dtype} trainer: verified", total=REQUESTS)
    module = "deploy.demo.rollout"
    command = [sys.executable, "-m", module, "--collector", engines, "--dtype", dtype, "--seed", str(seed)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE)
    command = [sys.executable, "-m", "deploy.demo.train", "--collector", trainers, "--dtype", dtype]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    reports: list[TrainerReport] = []
    listener = threading.Thread(target=_listen, args=(trainer.stdout, bars, trained, reports))
    listener.start()
    assert engine.stdout is not None
    assert trainer.stdin is not None
    report = None
    try:
        for line in engine.stdout:
            message = _LINE.decode(line)
            if isinstance(message, EngineReport):
                report = message
                break
            trainer.stdin.write(line)
            trainer.stdin.flush()
            bars.advance(rolled)
        trainer.stdin.close()
    except BrokenPipeError:
        pass
    codes = engine.wait(), trainer.wait()
    listener.join()
    if any(codes) or report is None or not reports:
        raise SystemExit(f"demo: {dtype}: the engine's process ended with {codes[0]}, the trainer's with {codes[1]}")
    with RouteClient(trainers, timeout=10.0) as client:
        return Run(report, reports[0], client.stats())


def _listen(stdout: IO[bytes] | None, bars: Progress, task: int, reports: list[TrainerReport]) -> None:
    assert stdout is not None
    for line in stdout:
        message = _LINE.decode(line)
        if isinstance(message, TrainerReport):
            reports.append(message)
        else:
            bars.advance(task)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
