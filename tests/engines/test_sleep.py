"""Sleep gives all memory back; what wakes is declared and proven anew, and holds no row of before."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers

from collector.client import RouteClient
from engine_side.capture.errors import EngineRunning
from engine_side.capture.records import RecordLayout
from engine_side.capture.slot_store import SlotStore
from engine_side.engines.transformers import capture, capture_routes
from tests.engines.memory import allow, kv_bytes, noting, sized
from tests.engines.running import batching, cached_rows, check_rows, generation
from tests.harness.daemon import RunningDaemon
from tests.harness.tiny import prompts

pytestmark = pytest.mark.timeout(240)

LIMIT = 24 << 20


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry a start-up proof."""
    found: list[None] = []
    prove = capture.prove

    def counting(*args: Any) -> None:
        prove(*args)
        found.append(None)

    monkeypatch.setattr(capture, "prove", counting)
    return found


def tensor_bytes() -> int:
    """Bytes of all tensors that anybody holds, each memory once."""
    gc.collect()
    held: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):  # a compiler keeps tensors without memory
            storage = each.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def ask(manager: Any, text: list[int], *names: str) -> dict[str, list[int]]:
    """One request after the other: tokens by name."""
    tokens = {}
    for name in names:
        manager.add_request(text, name)
        output = manager.get_result(timeout=60.0)
        assert output.request_id == name
        tokens[name] = [*output.prompt_ids, *output.generated_tokens]
    return tokens


@pytest.mark.parametrize("same_manager", [False, True], ids=["new manager", "same manager"])
def test_stopped_freed_and_started_three_times(
    model: Any,
    witness: Any,
    collector: RunningDaemon,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    proofs: list[None],
    same_manager: bool,
) -> None:
    if same_manager and transformers.__version__.startswith("5.17."):
        pytest.skip("a manager of 5.17 loses its paged attention at `stop`: restarted, its own tokens are wrong")
    text, how = prompts(1, seed, shared=(100, 100))[0], f"{same_manager:d}"
    allow(monkeypatch, LIMIT)
    planned = noting(monkeypatch)
    tokens: dict[str, list[int]] = {}
    floor, blocks, stores = [], [], []

    def make() -> Any:
        return model.init_continuous_batching(generation_config=generation(4), continuous_batching_config=sized())

    with capture_routes(model, collector.engines) as captured:
        layout = RecordLayout.of(captured.geometry)
        manager = make()
        floor.append(tensor_bytes())
        for round_ in range(3):
            captured.set_weight_version(round_ + 1)
            manager = manager if same_manager else make()
            manager.start()
            tokens |= ask(manager, text, f"round-{how}-{round_}-0", f"round-{how}-{round_}-1")
            with pytest.raises(EngineRunning):
                captured.sleep()
            processor = manager.batch_processor
            (reference,) = captured._processors
            pipeline = reference().pipeline  # type: ignore[union-attr]
            store = pipeline.store
            assert store is not None
            blocks.append(planned[-1].blocks)
            stores.append((store.num_slots, store.nbytes))
            # Declared to the planner, said by the class, allocated: one figure.
            assert store.nbytes == SlotStore.declared_bytes(layout, store.num_slots)
            assert kv_bytes(processor.cache) + store.nbytes + pipeline.recorder.nbytes <= LIMIT
            held = (processor, processor.cache, pipeline, pipeline.recorder, *store.tensors)
            alive = [weakref.ref(each) for each in held]
            del held
            del processor, pipeline, store
            manager.stop(block=True)
            assert [each() for each in alive] == [None] * 7
            captured.sleep()
            floor.append(tensor_bytes())
        assert captured.stats().errors == 0
    assert len(proofs) == 3
    assert len(set(blocks)) == len(set(stores)) == 1
    tokens_held = (blocks[0] + 2) * planned[0].block_tokens
    assert stores[0] == (tokens_held, (tokens_held + 1) * SlotStore.slot_bytes(layout))
    assert max(floor[1:]) <= floor[0]
    with RouteClient(collector.trainers, timeout=30.0) as client:
        for name, each in tokens.items():
            version, second = int(name[-3]) + 1, name.endswith("1")
            routes = client.pull(name, token_ids=each)
            assert check_rows(witness, routes, each) == len(each) - 1
            # The second of a round finds the first's rows; the first finds none, whatever slots held the text before.
            assert (cached_rows(routes) > 0) == second
            assert routes.weight_spans == ((0, len(each) - 1, version),)


def test_a_manager_that_was_kept_loses_its_cache(
    model: Any, witness: Any, collector: RunningDaemon, seed: int, proofs: list[None]
) -> None:
    text = prompts(1, seed, shared=(100, 100))[0]
    tokens: dict[str, list[int]] = {}

    def session(name: str) -> Any:
        with model.continuous_batching_context_manager(
            generation_config=generation(4), continuous_batching_config=batching(), persistent_manager=True
        ) as manager:
            tokens.update(ask(manager, text, name))
        return manager

    with capture_routes(model, collector.engines) as captured:
        manager = session("kept-0")
        assert session("kept-1") is manager
        cache = weakref.ref(manager.batch_processor.cache)
        captured.sleep()
        assert cache() is None
        assert not manager.warmed_up
        assert session("kept-2") is manager
        assert captured.stats().errors == 0
    model.destroy_cached_continuous_batching_manager()
    assert len(proofs) == 2
    with RouteClient(collector.trainers, timeout=30.0) as client:
        for name, each in tokens.items():
            routes = client.pull(name, token_ids=each)
            assert check_rows(witness, routes, each) == len(each) - 1
            assert (cached_rows(routes) > 0) == (name == "kept-1")


def test_a_processor_that_somebody_holds_keeps_no_store(model: Any, collector: RunningDaemon, seed: int) -> None:
    text = prompts(1, seed)[0]
    with capture_routes(model, collector.engines) as captured:
        manager = model.init_continuous_batching(generation_config=generation(3), continuous_batching_config=batching())
        manager.start()
        ask(manager, text, "held")
        processor = manager.batch_processor
        (reference,) = captured._processors
        alive = [weakref.ref(each) for each in reference().pipeline.store.tensors]  # type: ignore[union-attr]
        manager.stop(block=True)
        gc.collect()
        # Its graphs, on a GPU, may still be replayed, and write there.
        assert all(each() is not None for each in alive)
        captured.sleep()
        assert [each() for each in alive] == [None] * 3
        assert not hasattr(processor, "r3_pipeline")
        assert "_generation_step" not in vars(processor)
