"""One run of one case, with capture or without: what it took, and with capture what can be pulled afterwards."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from collector.client import RouteClient
from engine_side.engines.transformers import capture_routes
from tests.gpu import varlen
from tests.gpu.steps import GraphCounts, StepClock
from tests.gpu.workload import Case, Scale, batching_of, generation_of, pages_of, prefill_steps, prompts_of
from tests.harness.daemon import RunningDaemon

DEADLINE_S = 240.0
SAMPLE = 6
"""Requests pulled and looked at after a run."""


@dataclass(frozen=True)
class Bench:
    """What all runs share."""

    model: Any
    scale: Scale
    daemon: RunningDaemon
    graphs: GraphCounts
    use_graphs: bool
    paged: bool
    overlap: bool
    warm: bool
    seed: int
    window_bytes: int


def run_case(bench: Bench, case: Case, on: bool, number: int) -> dict[str, Any]:
    """Run it. Raises where a request fails, a graph was asked for and none replayed, or a pulled route is not whole."""
    mode = "on" if on else "off"
    prefix = f"{case.concurrency}-{mode}-{number}"
    replays, captures = bench.graphs.replays, bench.graphs.captures
    clock = StepClock(bench.graphs, case.concurrency)
    started = time.perf_counter()
    with capture_routes(
        bench.model, bench.daemon.engines, on, engine_id="serving", window_cap_bytes=bench.window_bytes
    ) as capture:
        waves, names = _serve(bench, case, clock, prefix)
    outputs = [output for wave in waves for output in wave]
    found = _figures(case, waves) | _steps(clock, bench.use_graphs)
    found |= {
        "case": case.name,
        "mode": mode,
        "number": number,
        "graph_replays": bench.graphs.replays - replays,
        "graph_captures": bench.graphs.captures - captures,
        "seconds": time.perf_counter() - started,
    }
    if bench.use_graphs and not found["decode_steps"]:
        raise AssertionError(f"no decode step of {prefix} replayed a CUDA graph")
    if on:
        stats = capture.stats()
        found |= {"drained": capture.drained, "stats": stats.as_dict()}
        found |= _pull(bench, case, outputs, names)
    if torch.cuda.is_available():
        found["gpu_gib_left_allocated"] = torch.cuda.memory_allocated() / 2**30
        found["gpu_gib_peak"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return found


def _serve(bench: Bench, case: Case, clock: StepClock, prefix: str) -> tuple[list[list[Any]], list[str]]:
    """The outputs of the measured waves, and the names of every request that ran."""
    manager = bench.model.init_continuous_batching(
        generation_config=generation_of(case),
        continuous_batching_config=batching_of(bench.scale, case, bench.use_graphs, bench.overlap),
    )
    config = manager.continuous_batching_config
    assert any(config.cuda_graph_booleans) == bench.use_graphs, f"CUDA graphs are {config.cuda_graph_booleans}"
    assert config.max_blocks_per_request == 0
    if bench.paged:
        # The engine allows block tables for flash-attn's names alone; read when the cache is made, at the start.
        config.max_blocks_per_request = pages_of(bench.scale, case)
    varlen.longest_query = max(2, case.prompt)
    names: list[str] = []
    waves = []
    clock.install(manager)
    manager.start()
    try:
        if bench.warm:
            # Long enough that the first request still decodes when the last one has prefilled: the same graph sizes.
            new = min(case.new, prefill_steps(bench.scale, case) + 4)
            _wave(manager, prompts_of(bench.scale, case, 999, bench.seed), new, f"{prefix}-warm", names)
        clock.steps.clear()
        for wave in range(case.waves):
            prompts = prompts_of(bench.scale, case, wave, bench.seed)
            waves.append(_wave(manager, prompts, case.new, f"{prefix}-{wave}", names))
    finally:
        manager.stop(block=True, timeout=60.0)
        manager.destroy()
        # The clock's closure and this frame hold the manager; its cache must be gone before the next one is made.
        vars(manager).pop("_generation_step", None)
        del manager
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return waves, names


def _wave(manager: Any, prompts: list[list[int]], new: int, prefix: str, names: list[str]) -> list[Any]:
    """Everything is asked for at once; returns when the last request has finished."""
    ids = [f"{prefix}-{i}" for i in range(len(prompts))]
    names.extend(ids)
    for request_id, prompt in zip(ids, prompts, strict=True):
        manager.add_request(prompt, request_id, max_new_tokens=new, record_timestamps=True)
    outputs: dict[str, Any] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(outputs) < len(ids):
        output = manager.get_result(timeout=0.5)
        if output is None:
            fatal = manager.background_thread_status.fatal_error
            if fatal is not None or not manager.is_running():
                raise RuntimeError(f"the engine stopped in {prefix}: {fatal}") from fatal
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(ids) - len(outputs)} requests of {prefix} did not come back")
        elif output.error is not None:
            raise RuntimeError(f"{output.request_id} failed: {output.error}")
        elif output.is_finished():
            outputs[output.request_id] = output
    for output in outputs.values():
        assert len(output.generated_tokens) == new == len(output.timestamps), output.request_id
    return [outputs[request_id] for request_id in ids]


def _figures(case: Case, waves: list[list[Any]]) -> dict[str, Any]:
    took = sum(max(o.timestamps[-1] for o in wave) - min(o.created_time for o in wave) for wave in waves)
    outputs = [output for wave in waves for output in wave]
    first = [o.timestamps[0] - o.created_time for o in outputs]
    each = [(o.timestamps[-1] - o.timestamps[0]) / (len(o.timestamps) - 1) for o in outputs]
    gaps = np.concatenate([np.diff(o.timestamps) for o in outputs])
    return {
        "requests": len(outputs),
        "tokens_per_s": sum(len(o.generated_tokens) for o in outputs) / took,
        "all_tokens_per_s": sum(case.prompt + len(o.generated_tokens) for o in outputs) / took,
        "ttft_mean_ms": fmean(first) * 1e3,
        "tpot_mean_ms": fmean(each) * 1e3,
        "tpot_p99_ms": float(np.percentile(each, 99)) * 1e3,
        "token_gap_p99_ms": float(np.percentile(gaps, 99)) * 1e3,
    }


def _steps(clock: StepClock, graphs: bool) -> dict[str, Any]:
    kept = clock.decode_seconds(graphs)
    return {
        "steps": len(clock.steps),
        "steps_replayed": sum(step.replays > 0 for step in clock.steps),
        "steps_captured": sum(step.captures > 0 for step in clock.steps),
        "decode_steps": len(kept),
        "decode_step_ms": median(kept) * 1e3 if kept else None,
        "decode_step_p99_ms": float(np.percentile(kept, 99)) * 1e3 if kept else None,
        "decode_steps_ms": [round(seconds * 1e3, 4) for seconds in kept],
    }


def _pull(bench: Bench, case: Case, outputs: list[Any], names: list[str]) -> dict[str, Any]:
    """Look at some requests' routes, whole rows all, then release every request of the run."""
    config = bench.model.config
    expected = (case.prompt + case.new - 1, config.num_hidden_layers, config.num_experts_per_tok)
    chosen = [outputs[i] for i in np.linspace(0, len(outputs) - 1, min(SAMPLE, len(outputs))).astype(int)]
    started = time.perf_counter()
    with RouteClient(bench.daemon.trainers, timeout=60.0) as client:
        for output in chosen:
            tokens = [*output.prompt_ids, *output.generated_tokens]
            routes = client.pull(output.request_id, token_ids=tokens)
            assert routes.status == "complete", f"{output.request_id} is {routes.status}, missing {routes.missing}"
            assert routes.array.shape == expected, f"{output.request_id}: {routes.array.shape}, not {expected}"
            ordered = np.sort(routes.array, axis=-1)
            assert ordered[..., 0].min() >= 0, f"{output.request_id} has uncaptured cells"
            assert ordered[..., -1].max() < config.num_experts
            assert (ordered[..., 1:] != ordered[..., :-1]).all(), f"{output.request_id} has an expert twice in a row"
        pull_s = time.perf_counter() - started
        released = client.release(names)
    return {"pulled": len(chosen), "pull_s": pull_s, "released": released}
