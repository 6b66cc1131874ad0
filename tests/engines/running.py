"""A real engine on the tiny model, a real collector in its own process, and the comparison with a prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from collector.client import RouteClient, Routes
from engine_side.engines.transformers import capture_routes
from engine_side.engines.transformers.stats import CaptureStats
from protocol.messages import Kind
from tests.engines.ties import RESOLUTION, worst_shortfall
from tests.harness.witness import differing_rows, prefill_routes

DEADLINE_S = 120.0


@dataclass
class Finished:
    """What came back. outputs: by the name that routes are collected under, the last output of each request."""

    outputs: dict[str, Any] = field(default_factory=dict)
    stats: CaptureStats = field(default_factory=CaptureStats)

    def tokens(self, name: str) -> list[int]:
        output = self.outputs[name]
        return [*output.prompt_ids, *output.generated_tokens]


@dataclass(frozen=True)
class Ask:
    """A request. cancel_after: generated tokens after which it is cancelled, or None."""

    prompt: Sequence[int]
    request_id: str
    new_tokens: int = 12
    siblings: int = 1
    cancel_after: int | None = None


def batching(**settings: Any) -> ContinuousBatchingConfig:
    """A configuration for this version of the engine; `page_size` goes by its name there."""
    defaults: dict[str, Any] = {
        "page_size": 32,
        "num_blocks": 256,
        "max_batch_tokens": 256,
        "use_cuda_graph": False,
        "use_async_batching": False,
    }
    settings = defaults | settings
    if transformers.__version__.startswith("5.17."):
        settings["block_size"] = settings.pop("page_size")
    return ContinuousBatchingConfig(**settings)


def generation(new_tokens: int = 12, sample: bool = True) -> GenerationConfig:
    """Never stopped by a token; sampled, or greedy."""
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    return GenerationConfig(do_sample=sample, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0, **how)


def run(
    model: Any,
    collector: str,
    asks: Sequence[Ask],
    config: ContinuousBatchingConfig,
    *,
    then: Sequence[Sequence[Ask]] = (),
    sample: bool = True,
) -> Finished:
    """Run `asks` to their ends under capture. then: further waves, each once the one before it has ended."""
    done = Finished()
    with capture_routes(model, collector, engine_id="under-test") as capture:
        with model.continuous_batching_context_manager(
            generation_config=generation(sample=sample), continuous_batching_config=config
        ) as manager:
            for wave in (asks, *then):
                _submit(manager, wave)
                _collect(manager, capture, wave, done)
        while (output := manager.get_result(timeout=0.0)) is not None:
            done.outputs[capture.client_id(output.request_id)] = output
    done.stats = capture.stats()
    assert capture.drained
    assert done.stats.errors == 0
    return done


def names(ask: Ask) -> list[str]:
    """The names an ask's sequences are collected under."""
    from protocol.ids import sibling_id

    return [ask.request_id] if ask.siblings == 1 else [sibling_id(ask.request_id, i) for i in range(ask.siblings)]


def _submit(manager: Any, asks: Sequence[Ask]) -> None:
    for ask in asks:
        manager.num_return_sequences = ask.siblings
        manager.add_request(
            list(ask.prompt), ask.request_id, max_new_tokens=ask.new_tokens, streaming=ask.cancel_after is not None
        )


def _collect(manager: Any, capture: Any, asks: Sequence[Ask], done: Finished) -> None:
    waiting = {name: ask for ask in asks for name in names(ask)}
    deadline = time.monotonic() + DEADLINE_S
    while waiting:
        output = manager.get_result(timeout=0.5)
        assert time.monotonic() < deadline, f"{sorted(waiting)} did not come back"
        assert output is not None or manager.is_running(), f"the engine stopped, {sorted(waiting)} did not come back"
        if output is None:
            continue
        name = capture.client_id(output.request_id)
        done.outputs[name] = output
        ask = waiting.get(name)
        if ask is None:
            continue
        if ask.cancel_after is not None and len(output.generated_tokens) >= ask.cancel_after:
            manager.cancel_request(output.request_id)
            del waiting[name]
        elif output.is_finished():
            assert output.error is None
            del waiting[name]


def check_rows(witness: Any, routes: Routes, tokens: Sequence[int]) -> int:
    """Every served row against a prefill of the same tokens, as sets per layer. Returns how many were compared.

    Where one differs (1 in 20,000 does), float32 must be unable to tell the request's choices from a prefill's."""
    served = len(routes.array)
    assert routes.missing == ()
    assert served <= len(tokens) - 1
    expected = prefill_routes(witness, list(tokens)[: served + 1])
    assert len(expected) == served
    wrong = differing_rows(routes.array, expected)
    if len(wrong):
        short = worst_shortfall(witness, list(tokens)[: served + 1], routes.array)
        assert short < RESOLUTION, (
            f"{routes.request_id}: {len(wrong)} cells of {served} rows differ, first at {wrong[:4].tolist()}, and the "
            f"worst is no tie: it falls short by {short:.1e}"
        )
    return served


def check_all(witness: Any, trainers: str, done: Finished) -> int:
    """Pull and compare everything that finished. Returns the number of rows compared."""
    rows = 0
    with RouteClient(trainers, timeout=30.0) as client:
        for name in done.outputs:
            tokens = done.tokens(name)
            routes = client.pull(name, token_ids=tokens)
            assert routes.status == "complete"
            assert routes.array.shape[0] == len(tokens) - 1
            rows += check_rows(witness, routes, tokens)
    return rows


def cached_rows(routes: Routes) -> int:
    """Rows that were read back from the slot store."""
    return sum(stop - start for start, stop, kind in routes.provenance if kind == Kind.CACHED)


@contextmanager
def pulled(trainers: str, name: str, **how: Any) -> Iterator[Routes]:
    """One pull with a client of its own."""
    with RouteClient(trainers, timeout=30.0) as client:
        yield client.pull(name, **how)
