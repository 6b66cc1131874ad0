"""Edges of a real engine: ends, rejections, failures, prompts that the cache holds whole, an engine that is let go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from collector.client import RouteClient
from collector.client.errors import RequestFailed, RequestIncomplete
from engine_side.capture.recorder import RouteRecorder
from engine_side.engines.transformers import capture_routes
from tests.engines.running import Ask, batching, cached_rows, check_all, check_rows, generation, run
from tests.harness.daemon import RunningDaemon
from tests.harness.tiny import prompts

pytestmark = pytest.mark.timeout(240)


def test_many_prefix_hits_in_one_step(model: Any, witness: Any, collector: RunningDaemon, seed: int) -> None:
    texts = prompts(25, seed, families=1, shared=(130, 130), own=(4, 8))
    with (
        capture_routes(model, collector.engines) as capture,
        model.continuous_batching_context_manager(
            generation_config=generation(3), continuous_batching_config=batching(max_batch_tokens=512)
        ) as manager,
    ):
        manager.add_request(texts[0], "many-0")
        outputs = {"many-0": manager.get_result(timeout=60.0)}
        for i, text in enumerate(texts[1:], 1):
            manager.add_request(text, f"many-{i}")
        while len(outputs) < 25 and (output := manager.get_result(timeout=60.0)) is not None:
            outputs[output.request_id] = output
    stats = capture.stats()
    assert len(outputs) == 25
    assert stats.errors == 0
    assert stats.rows_lost == 0
    with RouteClient(collector.trainers, timeout=30.0) as client:
        for name, output in outputs.items():
            tokens = [*output.prompt_ids, *output.generated_tokens]
            routes = client.pull(name, token_ids=tokens)
            assert check_rows(witness, routes, tokens) == len(tokens) - 1
            assert name == "many-0" or cached_rows(routes) == 128


def test_a_prompt_that_the_cache_holds_to_its_last_page(
    model: Any, witness: Any, collector: RunningDaemon, seed: int
) -> None:
    text = prompts(1, seed, shared=(100, 100))[0][:64]
    asks = [Ask(text, f"whole-{i}", 4 + i) for i in range(4)]
    done = run(model, collector.engines, asks, batching(max_batch_tokens=64))
    assert len(done.outputs) == 4
    assert done.stats.cached_rows >= 3 * 32
    assert check_all(witness, collector.trainers, done) == sum(64 + 4 + i - 1 for i in range(4))


@pytest.mark.parametrize("length", [1, 2, 32, 33])
def test_siblings_of_a_short_prompt(model: Any, witness: Any, collector: RunningDaemon, seed: int, length: int) -> None:
    texts = prompts(2, seed, families=1, shared=(64, 64))
    asks = [Ask(text[:length], f"brood-{length}-{i}", 5, siblings=3) for i, text in enumerate(texts)]
    # Someone else keeps the batch from being empty: the engine cannot run a batch of no token at all.
    asks.insert(0, Ask(prompts(1, seed + 1)[0], f"brood-{length}-other", 12))
    done = run(model, collector.engines, asks, batching())
    assert len(done.outputs) == 7
    assert check_all(witness, collector.trainers, done) == sum(len(done.tokens(name)) - 1 for name in done.outputs)


def test_a_stop_token_ends_a_request_where_it_stands(
    model: Any, witness: Any, collector: RunningDaemon, seed: int
) -> None:
    text = prompts(1, seed)[0]
    greedy = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0)
    with (
        capture_routes(model, collector.engines) as capture,
        model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=batching()
        ) as manager,
    ):
        manager.add_request(text, "unstopped")
        first = manager.get_result(timeout=60.0)
        stop = first.generated_tokens[3]
        manager.add_request(text, "stopped", eos_token_id=stop)
        second = manager.get_result(timeout=60.0)
    assert capture.stats().errors == 0
    assert second.generated_tokens == first.generated_tokens[: first.generated_tokens.index(stop) + 1]
    with RouteClient(collector.trainers, timeout=30.0) as client:
        for name, output, reason in (("unstopped", first, "length"), ("stopped", second, "stop")):
            tokens = [*output.prompt_ids, *output.generated_tokens]
            assert check_rows(witness, client.pull(name, token_ids=tokens), tokens) == len(tokens) - 1
            (life,) = client.describe(name)
            assert any(what.startswith(f"finished: {reason}, {len(tokens)} tokens") for _, what in life.events)


def test_a_request_that_the_engine_rejects_is_known_as_failed(
    model: Any, witness: Any, collector: RunningDaemon, seed: int
) -> None:
    text = prompts(1, seed)[0]
    with (
        capture_routes(model, collector.engines) as capture,
        model.continuous_batching_context_manager(
            generation_config=generation(4), continuous_batching_config=batching(per_request_processors=True)
        ) as manager,
    ):
        manager.add_request(text, "rejected", temperature="hot", no_such_processor=1)
        manager.add_request(text, "accepted")
        outputs = {output.request_id: output for output in (manager.get_result(timeout=60.0) for _ in range(2))}
    assert outputs["rejected"].error
    assert capture.stats().failed == 1
    assert capture.stats().errors == 0
    tokens = [*outputs["accepted"].prompt_ids, *outputs["accepted"].generated_tokens]
    with RouteClient(collector.trainers, timeout=30.0) as client:
        assert check_rows(witness, client.pull("accepted", token_ids=tokens), tokens) == len(tokens) - 1
        with pytest.raises(RequestFailed):
            client.pull("rejected")


def test_a_forward_that_raises_fails_its_requests(model: Any, collector: RunningDaemon, seed: int) -> None:
    texts = prompts(3, seed)

    def broken(_module: Any, _inputs: Any) -> None:
        raise RuntimeError("device lost")

    with (
        capture_routes(model, collector.engines) as capture,
        model.continuous_batching_context_manager(
            generation_config=generation(30), continuous_batching_config=batching()
        ) as manager,
    ):
        for i, text in enumerate(texts):
            manager.add_request(text, f"broken-{i}", streaming=i == 0)
        assert manager.get_result(timeout=60.0).request_id == "broken-0"
        handle = model.model.layers[2].register_forward_pre_hook(broken)
        failed = set()
        while len(failed) < 3 and (output := manager.get_result(timeout=60.0)) is not None:
            if output.error:
                failed.add(output.request_id)
        handle.remove()
    assert len(failed) == 3
    assert capture.stats().errors == 0
    assert capture.stats().failed == 3
    with RouteClient(collector.trainers, timeout=30.0) as client:
        for name in failed:
            with pytest.raises(RequestFailed, match="device lost"):
                client.pull(name)


def test_a_fault_of_capture_loses_its_step_and_nothing_else(
    model: Any, witness: Any, collector: RunningDaemon, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not a whole number of pages: 5.17 matches a prompt to its last token, 5.24 to its last full page but one token.
    text, other = (prompt[:101] for prompt in prompts(2, seed, families=2, shared=(100, 120)))
    commit, calls = RouteRecorder.commit, []

    def once(self: RouteRecorder, *args: Any) -> Any:
        if self.commit_no and not calls:  # the first step of a request; the start-up proof is none
            calls.append(1)
            raise RuntimeError("planted")
        return commit(self, *args)

    monkeypatch.setattr(RouteRecorder, "commit", once)
    with (
        capture_routes(model, collector.engines) as capture,
        model.continuous_batching_context_manager(
            generation_config=generation(6), continuous_batching_config=batching()
        ) as manager,
    ):
        outputs = {}
        for name, prompt in (("faulty", text), ("whole", other), ("behind-it", text)):
            manager.add_request(prompt, name)
            outputs[name] = manager.get_result(timeout=60.0)
        assert [len(output.generated_tokens) for output in outputs.values()] == [6, 6, 6]
        assert capture.stats().errors == 1
        tokens = {name: [*output.prompt_ids, *output.generated_tokens] for name, output in outputs.items()}
        with RouteClient(collector.trainers, timeout=30.0) as client:
            with pytest.raises(RequestIncomplete) as caught:
                client.pull("faulty")
            assert caught.value.missing == ((0, len(text)),)
            assert check_rows(witness, client.pull("whole"), tokens["whole"]) == len(tokens["whole"]) - 1
            # Its prefix hit stands on KV whose rows were lost: missing, not another request's.
            with pytest.raises(RequestIncomplete) as caught:
                client.pull("behind-it")
            assert caught.value.missing == ((0, (len(text) - 1) // 32 * 32),)


def test_rows_of_an_older_occupant_never_stand_in_for_a_lost_step(
    model: Any, collector: RunningDaemon, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens at the same positions in the same slots, but of an earlier request: a fork must not take them."""
    text = prompts(1, seed, shared=(100, 100))[0][:100]
    config = batching(num_blocks=8, allow_block_sharing=False, safety_margin=0.0)
    commit, broken = RouteRecorder.commit, []

    def fail_when_told(self: RouteRecorder, *args: Any) -> Any:
        if broken:
            broken.clear()
            raise RuntimeError("planted")
        return commit(self, *args)

    monkeypatch.setattr(RouteRecorder, "commit", fail_when_told)
    with (
        capture_routes(model, collector.engines) as capture,
        model.continuous_batching_context_manager(
            generation_config=generation(4), continuous_batching_config=config
        ) as manager,
    ):
        # Four blocks each: every slot of the cache has held this text once.
        for name in ("occupant-0", "occupant-1"):
            manager.add_request(text, name)
            assert manager.get_result(timeout=60.0).request_id == name
        broken.append(True)
        manager.num_return_sequences = 2
        manager.add_request(text, "lost")
        outputs = [manager.get_result(timeout=60.0) for _ in range(2)]
        assert all(len(output.generated_tokens) == 4 for output in outputs)
        assert capture.stats().errors == 1
        with RouteClient(collector.trainers, timeout=30.0) as client:
            for name in ("lost#0", "lost#1"):
                with pytest.raises(RequestIncomplete) as caught:
                    client.pull(name)
                assert caught.value.missing == ((0, 99),)


def test_an_engine_that_is_let_go_takes_its_cache_along(model: Any, collector: RunningDaemon, seed: int) -> None:
    text = prompts(1, seed)[0]
    with capture_routes(model, collector.engines):
        manager = model.init_continuous_batching(generation_config=generation(3), continuous_batching_config=batching())
        manager.start()
        manager.add_request(text, "let-go")
        assert manager.get_result(timeout=60.0).request_id == "let-go"
        cache = weakref.ref(manager.batch_processor.cache)
        manager.stop(block=True)
        gc.collect()
        assert cache() is None


def test_the_proof_reads_no_page_that_nobody_wrote(
    model: Any, collector: RunningDaemon, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5.17 does not clear its cache: whatever the allocator gave lies there, also what is no number."""
    make, filled = PagedAttentionCache.__init__, []

    def make_and_fill(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for tensor in (*getattr(self, "key_cache", ()), *getattr(self, "value_cache", ())):
            tensor[: self.num_blocks * self.block_size] = float("nan")
            filled.append(tensor)

    monkeypatch.setattr(PagedAttentionCache, "__init__", make_and_fill)
    done = run(model, collector.engines, [Ask(prompts(1, seed)[0], "proven")], batching())
    assert len(done.outputs) == 1
    assert bool(filled) == transformers.__version__.startswith("5.17.")


def test_a_forward_of_another_thread_is_no_step(model: Any, witness: Any, collector: RunningDaemon, seed: int) -> None:
    texts = prompts(3, seed)
    with (
        capture_routes(model, collector.engines) as capture,
        model.continuous_batching_context_manager(
            generation_config=generation(20), continuous_batching_config=batching()
        ) as manager,
    ):
        for i, text in enumerate(texts):
            manager.add_request(text, f"beside-{i}")
        outputs = {}
        router = model.model.layers[3].mlp.gate
        while len(outputs) < 3:
            router(torch.zeros(len(texts[0]), model.config.hidden_size, device=model.device))
            if (output := manager.get_result(timeout=0.001)) is not None:
                outputs[output.request_id] = output
    assert capture.stats().errors == 0
    with RouteClient(collector.trainers, timeout=30.0) as client:
        for name, output in outputs.items():
            tokens = [*output.prompt_ids, *output.generated_tokens]
            assert check_rows(witness, client.pull(name, token_ids=tokens), tokens) == len(tokens) - 1
