"""Rows on a real engine on a GPU, bit for bit beside an independent record of the same forwards.

CUDA graphs, async batching (two batches in flight), chunked prefill, prefix hits and preemption; then tiny random
models of every family: the right shape, no -1 where a layer routes, and prefix hits equal to the request that computed
them. Greedy: the engine's own warm-up reads a cache that nobody has written, and sampling stops at what it finds there.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collector.client import RouteClient, Routes
from engine_side.capture.errors import CaptureRefused
from engine_side.capture.hooks import find_routers, geometry_of
from tests.bench.record import Record, show
from tests.engines.running import Ask, Finished, batching, cached_rows, generation, run
from tests.gpu import results
from tests.gpu.independent import Witness, watching
from tests.harness.daemon import RunningDaemon, running_daemon
from tests.harness.tiny import load_tiny, prompts
from tests.replay.families import FREE, PROMISED, build

SEED = 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRAPHS_AND_ASYNC = ((True, False), (True, True), (False, True), (False, False))[0 if DEVICE.type == "cuda" else 3 :]
SCENARIOS: dict[str, dict[str, Any]] = {
    "chunked": {"max_batch_tokens": 64},
    "prefix hits": {},
    "preempted": {"num_blocks": 24, "safety_margin": 0.0, "allow_block_sharing": False},
}


def asks_of(scenario: str, tag: str) -> list[list[Ask]]:
    """Waves of requests; the next one starts when the last has finished."""
    if scenario == "preempted":
        texts = prompts(12, SEED, shared=(40, 60), own=(8, 30))
        return [[Ask(text, f"{tag}-{i}", new_tokens=70 + 4 * i) for i, text in enumerate(texts)]]
    texts = prompts(12, SEED, families=3, shared=(60, 130))
    asks = [Ask(text, f"{tag}-{i}", new_tokens=20 + i) for i, text in enumerate(texts)]
    if scenario == "prefix hits":
        again = [Ask(text, f"{tag}-again-{i}", new_tokens=9) for i, text in enumerate(texts)]
        return [asks, again]
    return [asks]


def served(daemon: RunningDaemon, done: Finished) -> Iterator[tuple[str, Routes]]:
    """What the collector serves of each request, complete or not at all."""
    with RouteClient(daemon.trainers, timeout=60.0) as client:
        for name in done.outputs:
            yield name, client.pull(name, token_ids=done.tokens(name))
            client.release([name])


def compare(daemon: RunningDaemon, done: Finished, witness: Witness, layers: tuple[int, ...]) -> tuple[int, int, int]:
    """(rows, rows that differ, rows out of the slot store)."""
    rows = wrong = cached = 0
    for name, routes in served(daemon, done):
        assert routes.status == "complete"
        assert routes.missing == ()
        assert len(routes.array) == len(done.tokens(name)) - 1
        cached += cached_rows(routes)
        for position, row in enumerate(routes.array[:, list(layers)]):
            expected = witness.expected(name, position)
            same = witness.ran_elsewhere(row, position) if expected is None else np.array_equal(row, expected)
            rows, wrong = rows + 1, wrong + (not same)
    return rows, wrong, cached


def run_scenario(daemon: RunningDaemon, model: Any, scenario: str, graphs: bool, overlap: bool, tag: str) -> Record:
    """One scenario, compared bit for bit."""
    if graphs:
        model.set_experts_implementation("batched_mm")  # the default one asks the host how many tokens an expert has
    routers = find_routers(model)
    geometry = geometry_of(model, routers)
    settings = {"use_cuda_graph": graphs, "use_async_batching": overlap, **SCENARIOS[scenario]}
    waves = asks_of(scenario, tag)
    with watching(routers, 1024, geometry.top_k, DEVICE) as witness:
        done = run(model, daemon.engines, waves[0], batching(**settings), then=waves[1:], sample=False)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        witness.settle()
        rows, wrong, cached = compare(daemon, done, witness, geometry.moe_layer_ids)
    stats = done.stats
    shown = {"chunked": stats.chunked_prefills, "prefix hits": cached, "preempted": stats.preemptions}[scenario]
    peers = {"rows": rows, "cached": cached, "replays": witness.replays, "steps": stats.steps, "lost": stats.rows_lost}
    peers |= {"preemptions": stats.preemptions, "chunks": stats.chunked_prefills}
    ok = wrong == 0 and rows > 0 and shown > 0 and stats.rows_lost == 0 and (witness.replays > 0) == graphs
    name = f"rows/{scenario}/{'graphs' if graphs else 'eager'}/{'async' if overlap else 'sync'}"
    return Record(
        name, "rows that differ", float(wrong), {k: float(v) for k, v in peers.items()}, 0.0, "0, and it happened", ok
    )


def run_family(daemon: RunningDaemon, name: str, model: Any, tag: str) -> Record:
    """A tiny random model under graphs: shape, no -1 at a MoE layer, and a prefix hit's rows those of the first."""
    model = model.eval().to(DEVICE)
    model.set_attn_implementation("sdpa" if name != "gpt_oss" else "eager")
    if DEVICE.type == "cuda":
        model.set_experts_implementation("batched_mm")
    bar = "no -1 where a layer routes, prefix hits equal; or refused by name, or not run by the engine either"
    vocabulary = model.config.get_text_config().vocab_size
    text = [(7 * i + 3) % (vocabulary - 1) for i in range(70)]
    settings = {"use_cuda_graph": DEVICE.type == "cuda", "num_blocks": 64, "max_batch_tokens": 128}
    if (said := without_capture(model, text, settings)) is not None:
        return Record(f"family/{name}", "not run by the engine", 1.0, {}, None, f"without capture: {said}"[:200], True)
    try:
        geometry = geometry_of(model, find_routers(model))
        waves = [[Ask(text, f"{tag}-first", 8)], [Ask(text, f"{tag}-second", 8)]]
        done = run(model, daemon.engines, waves[0], batching(**settings), then=waves[1:], sample=False)
    except CaptureRefused as error:
        return Record(f"family/{name}", "refused", 1.0, {}, None, f"refused: {error}"[:200], True)
    found = dict(served(daemon, done))
    first, second = (found[f"{tag}-{which}"] for which in ("first", "second"))
    layers = list(geometry.moe_layer_ids)
    missing = sum(int((routes.array[:, layers] < 0).sum()) for routes in found.values())
    prefix = cached_rows(second)
    equal = np.array_equal(first.array[:prefix], second.array[:prefix])
    shape = all(r.array.shape == (77, geometry.num_layers, geometry.top_k) for r in found.values())
    peers = {"cached": float(prefix), "moe layers": float(len(layers)), "layers": float(geometry.num_layers)}
    return Record(f"family/{name}", "ids missing", float(missing), peers, 0.0, bar, not missing and equal and shape)


def without_capture(model: Any, text: list[int], settings: dict[str, Any]) -> str | None:
    """Why the engine itself cannot run this model; None if it can."""
    try:
        outputs = model.generate_batch(
            [text], generation_config=generation(4, sample=False), continuous_batching_config=batching(**settings)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    failed = [output.error for output in outputs.values() if output.error]
    return failed[0] if failed else None if outputs else "it ended without an output"


def families() -> Iterator[tuple[str, Any]]:
    """Name and model, random weights."""
    import transformers

    for name in (*PROMISED, *FREE):
        yield name, build(name, SEED)
    config = transformers.Qwen3NextConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=4,
        intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=8,
        num_experts_per_tok=3, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(SEED)
    yield "qwen3_next", transformers.Qwen3NextForCausalLM(config)


def guarded(name: str, work: Any) -> Record:
    """A record also where the work fails: the others are wanted all the same."""
    try:
        record: Record = work()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:300]
        print(f"{name}: {said}", flush=True)
        return Record(name, "failed", 1.0, {}, None, said, False)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="build/gpu/correctness.json")
    parser.add_argument("--only", default="", help="part of a record's name")
    options = parser.parse_args()
    records: list[Record] = []
    tags = itertools.count()
    with tempfile.TemporaryDirectory() as folder, running_daemon(Path(folder), budget="1GiB") as daemon:
        for graphs, overlap in GRAPHS_AND_ASYNC:
            for scenario in SCENARIOS:
                name = f"rows/{scenario}/{'graphs' if graphs else 'eager'}/{'async' if overlap else 'sync'}"
                if options.only in name:
                    model = load_tiny(torch.float32, attention="sdpa").to(DEVICE)
                    tag = f"s{next(tags)}"
                    records.append(
                        guarded(name, lambda: run_scenario(daemon, model, scenario, graphs, overlap, tag))  # noqa: B023
                    )
        for name, model in families():
            if options.only in f"family/{name}":
                tag = f"f{next(tags)}"
                records.append(
                    guarded(f"family/{name}", lambda: run_family(daemon, name, model, tag))  # noqa: B023
                )
    results.write(options.out, "tests.gpu.correctness", records)
    show(records)


if __name__ == "__main__":
    main()
