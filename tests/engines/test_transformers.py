"""Routes out of real continuous batching equal a plain prefill of the same tokens: 0 differing rows in fp32."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import ContinuousBatchingConfig

from collector.client import RouteClient
from collector.client.errors import AmbiguousRequest, RequestAborted
from engine_side.engines.transformers import capture_routes
from tests.engines.running import (
    Ask,
    batching,
    cached_rows,
    check_all,
    check_rows,
    generation,
    pulled,
    run,
)
from tests.harness.daemon import RunningDaemon
from tests.harness.tiny import prompts

pytestmark = pytest.mark.timeout(240)


def test_basic(model: Any, witness: Any, collector: RunningDaemon, seed: int) -> None:
    asks = [Ask(text, f"basic-{i}", 6 + i) for i, text in enumerate(prompts(7, seed))]
    done = run(model, collector.engines, asks, batching())
    assert len(done.outputs) == 7
    assert check_all(witness, collector.trainers, done) == sum(len(done.tokens(n)) - 1 for n in done.outputs)
    assert done.stats.finished == 7


def test_chunked_prefill_delivers_chunks_without_output(
    model: Any, witness: Any, collector: RunningDaemon, seed: int
) -> None:
    asks = [Ask(text, f"chunked-{i}", 8) for i, text in enumerate(prompts(5, seed, shared=(150, 220)))]
    done = run(model, collector.engines, asks, batching(max_batch_tokens=48, allow_block_sharing=False))
    assert done.stats.chunked_prefills > 5
    assert check_all(witness, collector.trainers, done) > 500


def test_prefix_hits_come_out_of_the_slot_store(model: Any, witness: Any, collector: RunningDaemon, seed: int) -> None:
    texts = prompts(8, seed, families=2, shared=(140, 200))
    asks = [Ask(text, f"prefix-{i}", 6) for i, text in enumerate(texts)]
    done = run(model, collector.engines, asks, batching(max_batch_tokens=128))
    assert done.stats.cached_rows > 0
    assert check_all(witness, collector.trainers, done) > 0
    with RouteClient(collector.trainers) as client:
        served = sum(cached_rows(client.pull(name)) for name in done.outputs)
    assert served == done.stats.cached_rows


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_preempted_requests_keep_their_sampling_time_rows(
    model: Any, witness: Any, collector: RunningDaemon, seed: int, scheduler: str
) -> None:
    texts = prompts(12, seed, shared=(40, 60), own=(8, 30))
    asks = [Ask(text, f"preempted-{scheduler}-{i}", 70 + 4 * i) for i, text in enumerate(texts)]
    config = batching(num_blocks=24, scheduler_type=scheduler, safety_margin=0.0, allow_block_sharing=False)
    done = run(model, collector.engines, asks, config)
    assert done.stats.preemptions > 0
    assert len(done.outputs) == 12
    assert check_all(witness, collector.trainers, done) > 1000


def test_forked_siblings_are_complete_each_under_its_own_name(
    model: Any, witness: Any, collector: RunningDaemon, seed: int
) -> None:
    asks = [Ask(text, f"forked-{i}", 10, siblings=4) for i, text in enumerate(prompts(3, seed))]
    done = run(model, collector.engines, asks, batching())
    assert sorted(done.outputs) == [f"forked-{i}#{k}" for i in range(3) for k in range(4)]
    assert done.stats.forked_rows > 0
    assert check_all(witness, collector.trainers, done) == sum(len(done.tokens(n)) - 1 for n in done.outputs)


def test_cancelled_request_serves_its_prefix(model: Any, witness: Any, collector: RunningDaemon, seed: int) -> None:
    texts = prompts(4, seed)
    asks = [Ask(text, f"cancelled-{i}", 40, cancel_after=5 if i < 2 else None) for i, text in enumerate(texts)]
    done = run(model, collector.engines, asks, batching())
    assert done.stats.cancelled == 2
    with RouteClient(collector.trainers, timeout=30.0) as client:
        for i in range(4):
            tokens = done.tokens(f"cancelled-{i}")
            if i >= 2:
                check_rows(witness, client.pull(f"cancelled-{i}", token_ids=tokens), tokens)
                continue
            with pytest.raises(RequestAborted) as caught:
                client.pull(f"cancelled-{i}")
            prefix = caught.value.routes
            assert prefix is not None
            assert prefix.status == "aborted"
            assert check_rows(witness, prefix, tokens) >= len(texts[i]) + 4


@pytest.mark.engines
def test_request_cancelled_before_any_forward_is_known(model: Any, collector: RunningDaemon, seed: int) -> None:
    text = prompts(1, seed)[0]
    with (
        capture_routes(model, collector.engines) as capture,
        model.continuous_batching_context_manager(
            generation_config=generation(), continuous_batching_config=batching()
        ) as manager,
    ):
        manager.add_request(text, "first", max_new_tokens=30)
        manager.add_request(text, "never-ran", max_new_tokens=30)
        manager.cancel_request("never-ran")
        assert manager.get_result(timeout=60.0).request_id in ("first", "never-ran")
    assert capture.stats().errors == 0
    with pulled(collector.trainers, "never-ran", partial=True) as routes:
        assert routes.status in ("aborted", "complete")


@pytest.mark.parametrize(("length", "new_tokens"), [(1, 1), (1, 5), (40, 1), (32, 1), (33, 2)])
def test_short_ends(
    model: Any, witness: Any, collector: RunningDaemon, seed: int, length: int, new_tokens: int
) -> None:
    text = prompts(1, seed, shared=(64, 64))[0][:length]
    name = f"short-{length}-{new_tokens}"
    done = run(model, collector.engines, [Ask(text, name, new_tokens)], batching())
    assert len(done.tokens(name)) == length + new_tokens
    assert check_all(witness, collector.trainers, done) == length + new_tokens - 1


def test_an_id_used_again_is_another_life(model: Any, witness: Any, collector: RunningDaemon, seed: int) -> None:
    first, second = prompts(2, seed)
    one = run(model, collector.engines, [Ask(first, "again", 6)], batching())
    two = run(model, collector.engines, [Ask(second, "again", 9)], batching())
    with RouteClient(collector.trainers, timeout=30.0) as client:
        with pytest.raises(AmbiguousRequest):
            client.pull("again")
        for done in (one, two):
            tokens = done.tokens("again")
            check_rows(witness, client.pull("again", token_ids=tokens), tokens)


@pytest.mark.engines
def test_paged_eager_attention(model: Any, witness: Any, collector: RunningDaemon, seed: int) -> None:
    model.set_attn_implementation("eager")
    asks = [Ask(text, f"eager-{i}", 8) for i, text in enumerate(prompts(4, seed))]
    done = run(model, collector.engines, asks, batching(max_batch_tokens=64))
    assert check_all(witness, collector.trainers, done) > 0


def test_weight_version_marks_what_follows(model: Any, collector: RunningDaemon, seed: int) -> None:
    text = prompts(1, seed)[0]
    with capture_routes(model, collector.engines) as capture:
        capture.set_weight_version(7)
        config: ContinuousBatchingConfig = batching()
        model.generate_batch([text], generation_config=generation(6), continuous_batching_config=config)
    with RouteClient(collector.trainers, timeout=30.0) as client:
        page = client.requests(limit=1000)
        newest = page.entries[-1]
        routes = client.pull(newest.request_id, num_tokens=len(text) + 6)
    assert routes.weight_spans == ((0, len(text) + 5, 7),)
