"""Commits inside captured CUDA graphs: every replay records its own step, whatever else the device is doing.

The forward here is a few elementwise operations and a top-k a layer, so that a graph holds what matters: ids in memory
that the graph's pool uses again, copied aside by the graph itself as they were chosen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_side.capture.records import UNCAPTURED_LAYER, RecordLayout
from engine_side.export.pipeline import CapturePipeline, PrefixHits
from engine_side.export.planner import ScheduledBatch
from engine_side.shipping.pack import check
from protocol.geometry import Geometry
from tests.engine_side.rig import Queue, signed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")

DEVICE = torch.device("cuda", 0)
# An even number of layers: tables of addresses, which lie behind each other, are then all aligned alike, and a kernel
# that was compiled for one of them fits the others. Nothing may be compiled while a stream captures.
LAYERS = 8
SIZES = (1, 8, 32)
SLOTS = 256
SLEEP_CYCLES = 2_000_000_000  # about a second


@dataclass(frozen=True)
class Inputs:
    """What a step writes into the static inputs of a graph, on the device: `real` tokens, then padding of slot -1."""

    real: int
    start: int
    hidden: Tensor
    slots: Tensor
    positions: Tensor
    tokens: Tensor


class Address:
    """What a commit looks at of a tensor, without holding its memory."""

    def __init__(self, ids: Tensor) -> None:
        self.dtype, self.ndim, self.shape = ids.dtype, ids.ndim, ids.shape
        self._at, self._strides = ids.data_ptr(), ids.stride()

    def data_ptr(self) -> int:
        return self._at

    def stride(self, dim: int) -> int:
        return self._strides[dim]


def _graph_of(run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """`run` as a graph. The run before it compiles and loads every kernel, which may not happen during capture."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


class Engine:
    """A forward under capture, as graphs of several sizes in one pool, and the step around it."""

    def __init__(self, seed: int, experts: int = 16, top_k: int = 3, dtype: torch.dtype = torch.int64) -> None:
        self.geometry = Geometry(LAYERS + 2, tuple(range(1, LAYERS + 1)), top_k, experts)
        self.layout = RecordLayout.of(self.geometry)
        self.queue = Queue()
        shipper: Any = self.queue
        most = max(SIZES)
        self.pipeline = CapturePipeline(self.layout, shipper, max_tokens=most, num_slots=SLOTS, device=DEVICE)
        self.pool = torch.cuda.graph_pool_handle()
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        self._weights = (3 + 6 * torch.rand(LAYERS, experts, generator=self._generator)).to(DEVICE)
        self._hidden = torch.zeros(most, experts, device=DEVICE)
        self._slots, self._positions, self._tokens = (
            torch.full((most,), value, dtype=torch.int64, device=DEVICE) for value in (-1, 0, 0)
        )
        self.chosen = torch.zeros(most, LAYERS, top_k, dtype=torch.int64, device=DEVICE)
        """What the routers chose in the forward that ran last, written by the forward itself."""

    def forward(self, size: int, capturing: bool) -> None:
        hidden = self._hidden[:size]
        for layer in range(LAYERS):
            hidden = torch.frac(hidden * self._weights[layer] + hidden.roll(1, -1))
            ids = hidden.topk(self.geometry.top_k, dim=-1).indices.to(self._dtype)
            if capturing:
                self.pipeline.recorder.keep(layer, ids)
            self.chosen[:size, layer].copy_(ids)
            shape = ids.shape
            del ids
            # As a model's activations do: they take whatever memory is free by now.
            scratch = [torch.ones(shape, dtype=self._dtype, device=DEVICE) for _ in range(4)]
            del scratch
        if capturing:
            self.pipeline.commit(self._slots[:size], self._positions[:size], self._tokens[:size])

    def capture(self, size: int, capturing: bool = True) -> torch.cuda.CUDAGraph:
        """A graph of a forward of `size` tokens; not `capturing`: as if capture was installed only behind it."""
        self.pipeline.idle()
        self._slots.fill_(-1)
        graph = _graph_of(lambda: self.forward(size, capturing), self.pool)
        assert self.pipeline.failed is None, self.pipeline.failed
        return graph

    def inputs(self, real: int) -> Inputs:
        """Fresh ones. Slot 0 is nobody's: what is found there is a mistake."""
        pad = max(SIZES) - real
        start = int(torch.randint(0, 1_000, (1,), generator=self._generator))
        slots = torch.randperm(SLOTS - 1, generator=self._generator)[:real] + 1
        tokens = torch.randint(0, 50_000, (real,), generator=self._generator)
        columns = (slots, torch.arange(start, start + real), tokens)
        padded = (torch.nn.functional.pad(x, (0, pad), value=-1 if x is slots else 0).to(DEVICE) for x in columns)
        hidden = torch.rand(self._hidden.shape, generator=self._generator).to(DEVICE)
        return Inputs(real, start, hidden, *padded)

    def feed(self, inputs: Inputs) -> None:
        """Write them where graphs read them, on the device and without the host."""
        self._hidden.copy_(inputs.hidden)
        self._slots.copy_(inputs.slots)
        self._positions.copy_(inputs.positions)
        self._tokens.copy_(inputs.tokens)

    def step(self, graph: torch.cuda.CUDAGraph, inputs: Inputs, version: int = 0) -> Tensor:
        """A step by a replay. Returns what its routers chose, [real, layers, top_k], once the device gets there."""
        self.feed(inputs)
        self.pipeline.begin(version)
        graph.replay()
        chosen = self.chosen[: inputs.real].clone()
        end = inputs.start + inputs.real
        self.pipeline.end(ScheduledBatch(["a"], [inputs.start], [inputs.real], [end]))
        return chosen

    def stored(self) -> NDArray[np.int64]:
        """Ids of every slot's row, -1 = uncaptured."""
        assert self.pipeline.store is not None
        rows = self.pipeline.store.rows.cpu().numpy().view(self.layout.dtype)
        return signed(rows.reshape(-1, *self.geometry.row_shape))

    def numbers(self) -> list[int]:
        """The number of the commit that wrote each slot, the pad row left out."""
        assert self.pipeline.store is not None
        return (self.pipeline.store.stamps[:SLOTS, 0] >> 8).tolist()


@pytest.mark.parametrize(
    ("dtype", "experts", "top_k"),
    [
        (torch.int64, 16, 3),
        (torch.int32, 16, 1),
        (torch.int32, 64, 6),
        (torch.int64, 300, 1),
        (torch.int32, 300, 3),
        (torch.int64, 300, 6),
    ],
)
def test_a_replayed_graph_records_every_step(seed: int, dtype: torch.dtype, experts: int, top_k: int) -> None:
    """Sizes in any order, padding, fresh inputs: rows and store are what the forward chose, step by step."""
    engine = Engine(seed, experts, top_k, dtype)
    graphs = {size: engine.capture(size) for size in SIZES}
    chance = random.Random(seed)
    rows: dict[int, NDArray[np.int64]] = {}
    written: dict[int, int] = {}
    for step in range(1, 41):
        size = chance.choice(SIZES)
        inputs = engine.inputs(chance.randint(1, size))
        chosen = engine.step(graphs[size], inputs, version=step).cpu().numpy()
        landing = engine.queue.landings.pop()
        landing.wait()
        assert not check(landing)
        assert landing.slots is not None
        assert landing.slots.tolist() == inputs.slots[: inputs.real].tolist()
        assert np.array_equal(signed(landing.rows), chosen)
        assert not landing.status.any()
        assert landing.token_ids.tolist() == inputs.tokens[: inputs.real].tolist()
        assert landing.positions.tolist() == list(range(inputs.start, inputs.start + inputs.real))
        landing.free()
        for slot, row in zip(inputs.slots[: inputs.real].tolist(), chosen, strict=True):
            rows[slot], written[slot] = row, step
    stored = engine.stored()
    assert all(np.array_equal(stored[slot], row) for slot, row in rows.items())
    assert {slot: number for slot, number in enumerate(engine.numbers()) if number} == written
    assert (stored[0] == -1).all(), "padding reached slot 0"


def test_references_dropped_before_the_commit_give_wrong_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what holds the ids' memory until the commit is the reference, and nothing else."""
    engine = Engine(seed)
    keep = engine.pipeline.recorder.keep
    address: Any = Address
    monkeypatch.setattr(engine.pipeline.recorder, "keep", lambda layer, ids: keep(layer, address(ids)))
    graph = engine.capture(32)
    wrong = cells = 0
    for _ in range(5):
        chosen = engine.step(graph, engine.inputs(32)).cpu().numpy()
        landing = engine.queue.landings.pop()
        landing.wait()
        differs = (signed(landing.rows) != chosen).any(-1)
        wrong, cells = wrong + int(differs.sum()), cells + differs.size
        landing.free()
    assert wrong > cells / 2, f"{wrong} of {cells} (row, layer) cells are wrong"


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_the_next_replay_overwrites_nothing_that_is_not_copied_yet(
    seed: int, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The copy of a step is held up for a second while the next is launched. The control is without the wait."""
    engine = Engine(seed)
    graph = engine.capture(32)
    exporter, queue = engine.pipeline._exporter, engine.queue
    torch.cuda._sleep(1)
    for _ in range(3):  # so that pinned memory is there, and every kernel is loaded: either would wait for the sleep
        engine.step(graph, engine.inputs(32))
    for landing in queue.landings:
        landing.wait()
        landing.free()
    queue.landings.clear()
    if not waits:
        monkeypatch.setattr(exporter, "before_commit", lambda: None)
    steps = [engine.inputs(32) for _ in range(2)]
    torch.cuda.synchronize()
    assert exporter._stream is not None
    with torch.cuda.stream(exporter._stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    chosen = [engine.step(graph, inputs) for inputs in steps]
    assert not exporter._stream.query(), "the host waited for the copy"
    for landing in queue.landings:
        landing.wait()
    first, second = (signed(landing.rows) for landing in queue.landings)
    assert np.array_equal(second, chosen[1].cpu().numpy())
    assert np.array_equal(first, chosen[0].cpu().numpy()) == waits
    assert np.array_equal(first, second) != waits
    torch.cuda.synchronize()


def test_a_graph_captured_before_capture_was_installed_ships_no_row(seed: int) -> None:
    engine = Engine(seed)
    graph, late = engine.capture(8), engine.capture(8, capturing=False)
    for _ in range(2):
        chosen = engine.step(graph, engine.inputs(8)).cpu().numpy()
        landing = engine.queue.landings.pop()
        landing.wait()
        assert np.array_equal(signed(landing.rows), chosen)
        check(landing)
        engine.step(late, engine.inputs(8))
        landing = engine.queue.landings.pop()
        landing.wait()
        with pytest.raises(ValueError, match="8 of 8 rows were not committed by its forward"):
            check(landing)


def test_a_replay_before_the_first_step_commits_uncaptured_and_follows_no_address(seed: int) -> None:
    """A graph's table is filled at the next `begin`, for nothing may be enqueued beside a capture: until then it is
    empty, and a warm-up that replays at once reads nothing through it."""
    engine = Engine(seed)
    graph = engine.capture(8)
    inputs = engine.inputs(8)
    engine.feed(inputs)
    graph.replay()
    found = engine.pipeline.recorder.rows(8).columns()
    assert (signed(found.rows) == -1).all()
    assert (found.status == UNCAPTURED_LAYER).all()
    assert not (found.stamps >> 8).any()
    assert not any(engine.numbers()), "rows of no step prove nothing"
    assert (engine.stored()[inputs.slots.cpu()[:8]] == -1).all()
    chosen = engine.step(graph, inputs).cpu().numpy()
    landing = engine.queue.landings.pop()
    landing.wait()
    assert not check(landing)
    assert np.array_equal(signed(landing.rows), chosen)


def test_a_prefix_hit_of_100_000_rows_takes_bounded_memory(seed: int) -> None:
    """Of a 61-layer model, 93 MB of rows: read back in pieces, each behind the copy of the one before."""
    total, slots_there, piece = 100_000, 131_072, 4_096
    geometry = Geometry(61, tuple(range(3, 61)), 8, 256)
    queue = Queue()
    shipper: Any = queue
    pipeline = CapturePipeline(
        RecordLayout.of(geometry), shipper, max_tokens=piece, num_slots=slots_there, device=DEVICE
    )
    chance = torch.Generator(DEVICE).manual_seed(seed)
    slots = torch.randperm(slots_there, generator=chance, device=DEVICE)[:total]
    tokens = torch.randint(0, 150_000, (total,), generator=chance, device=DEVICE)

    def forward(slots: Tensor, tokens: Tensor, start: int) -> NDArray[np.int16]:
        pipeline.begin(1)
        ids = [torch.rand(len(slots), 256, generator=chance, device=DEVICE).topk(8).indices for _ in range(58)]
        for layer, one in enumerate(ids):
            pipeline.recorder.keep(layer, one)
        pipeline.commit(slots, torch.arange(start, start + len(slots), device=DEVICE), tokens)
        assert pipeline.failed is None, pipeline.failed
        return torch.stack(ids, 1).to(torch.int16).cpu().numpy()

    parts = range(0, total, piece)
    chosen = np.concatenate([forward(slots[at : at + piece], tokens[at : at + piece], at) for at in parts])
    forward(torch.tensor([-1], device=DEVICE), torch.tensor([0], device=DEVICE), total)
    known = tokens.cpu().numpy().astype(np.int32)
    hits = PrefixHits(["b"], [0], [total], [slots.cpu().numpy().astype(np.int32)], [known])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    pipeline.end(ScheduledBatch(["b"], [total], [1], [total + 1]), hits)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated(DEVICE) - before
    assert 0 < extra <= 64 << 20, f"{extra >> 20} MiB"
    at = 0
    for landing in queue.landings[1:]:
        landing.wait()
        count = len(landing.rows)
        assert not landing.status.any()
        assert np.array_equal(landing.token_ids, known[at : at + count])
        assert np.array_equal(landing.positions, np.arange(at, at + count))
        assert np.array_equal(landing.rows, chosen[at : at + count])
        landing.free()
        at += count
    assert at == total
    assert not queue.plans
