"""The commit inside a CUDA graph, beside what the seed does and beside nothing: microseconds net of the graph.

Several commits are captured in one graph and their time is divided, so that what a replay costs by itself drops out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine_side.capture import fused
from engine_side.capture.records import RecordLayout
from engine_side.capture.slot_store import SlotStore
from protocol.geometry import Geometry
from tests.bench.record import Record, show
from tests.gpu import prefix, results

LAYERS, TOP_K, EXPERTS = 62, 8, 250
TOKENS = (1, 64, 256, 1024, 8192)
SLOTS = 20_000
BANDWIDTH = 4.3e12
"""Bytes a second, read and written, of a device-to-device copy on this card."""


@dataclass
class Forward:
    """What the routers of one forward chose, and where its tokens go."""

    ids: list[torch.Tensor]
    slots: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor


def forward(tokens: int) -> Forward:
    """Random distinct ids on the device."""
    cuda = torch.device("cuda")
    ids = [torch.rand(tokens, EXPERTS, device=cuda).topk(TOP_K)[1].to(torch.int32) for _ in range(LAYERS)]
    at = torch.arange(tokens, device=cuda, dtype=torch.int32)
    return Forward(ids, torch.randperm(SLOTS, device=cuda)[:tokens], at, at + 100)


def captured(body: Callable[[], Any], times: int) -> torch.cuda.CUDAGraph:
    """A graph of `times` runs of `body`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            body()
    return graph


def median_us(graph: torch.cuda.CUDAGraph, replays: int = 200) -> float:
    """Median device time of a replay."""
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def net_us(body: Callable[[], Any], times: int) -> float:
    """Of one `body` in a graph, without what the graph itself costs."""
    return (median_us(captured(body, times)) - median_us(captured(body, 1))) / (times - 1)


def commit_body(step: Forward, layout: RecordLayout, store: SlotStore, records: torch.Tensor) -> Callable[[], None]:
    """Our commit of `step`: rows, store, token ids, positions, version, number and status."""
    state = torch.tensor([3, 7], dtype=torch.int64, device="cuda")
    columns = [[x.data_ptr() for x in step.ids], [x.stride(0) for x in step.ids], [TOP_K] * LAYERS]
    table = torch.tensor(columns, dtype=torch.int64, device="cuda")
    count = len(step.slots)

    def body() -> None:
        fused.commit(
            table, False, step.slots, step.positions, step.tokens, state, records, store.tensors, count, layout
        )

    return body


def check(step: Forward, layout: RecordLayout, store: SlotStore, records: torch.Tensor) -> None:
    """The rows are the ids, in batch order and by slot. Raises AssertionError."""
    expected = torch.stack(step.ids, 1)
    dtype = torch.uint8 if layout.narrow else torch.int16
    for rows in (records[:, : layout.row_bytes].contiguous(), store.rows[step.slots]):
        assert torch.equal(rows.view(dtype).view(expected.shape).int(), expected)
    trailer = records[:, layout.trailer_at :].contiguous().view(torch.int32)
    assert torch.equal(trailer[:, 0], step.tokens)
    assert torch.equal(trailer[:, 1], step.positions)
    assert (trailer[:, 2] == 7 << 8).all()
    assert (trailer[:, 3] == 3).all()


def measure(tokens: int) -> Iterator[Record]:
    """All ways at `tokens` a forward."""
    step = forward(tokens)
    wide = torch.full((SLOTS + 1, LAYERS, TOP_K), -1, dtype=torch.int32, device="cuda")
    short = wide.to(torch.int16)
    one = torch.zeros(1, device="cuda")

    def seed_way() -> None:
        for layer in range(LAYERS):
            wide[:, layer].index_put_((step.slots,), step.ids[layer])

    def seed_way_short() -> None:
        for layer in range(LAYERS):
            short[:, layer].index_put_((step.slots,), step.ids[layer].to(torch.int16))

    empty_kernel = net_us(lambda: one.add_(0), 40)
    peers = {
        "index_put int32": net_us(seed_way, 3),
        "index_put int16": net_us(seed_way_short, 3),
        "one empty kernel": empty_kernel,
        "empty graph, whole": median_us(captured(lambda: one.add_(0), 1)),
    }
    geometry = Geometry(LAYERS, tuple(range(LAYERS)), TOP_K, EXPERTS)
    for narrow in (False, True):
        layout = RecordLayout.of(geometry, narrow)
        store = SlotStore(layout, SLOTS, torch.device("cuda"))
        records = torch.zeros((tokens, layout.stride), dtype=torch.uint8, device="cuda")
        ours = net_us(commit_body(step, layout, store, records), 40)
        check(step, layout, store, records)
        moved = tokens * (LAYERS * TOP_K * 4 + layout.stride + SlotStore.slot_bytes(layout) + 16)
        share = ours / peers["index_put int32"]
        asked = tokens == 256 and not narrow
        yield Record(
            f"commit/{'uint8' if narrow else 'int16'}/{tokens}",
            "us net of the graph",
            ours,
            {**peers, "share of index_put int32": share, "bytes": float(moved)},
            empty_kernel + moved / BANDWIDTH * 1e6,
            "at most 2 % of index_put int32" if asked else None,
            not asked or share <= 0.02,
        )


def state_write() -> Record:
    """What numbering a step costs on the device, outside the graph: 16 bytes from pinned memory."""
    state = torch.zeros(2, dtype=torch.int64, device="cuda")
    row = torch.zeros(2, dtype=torch.int64, pin_memory=True)
    return Record("commit/number-of-a-step", "us", net_us(lambda: state.copy_(row, non_blocking=True), 40))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="build/gpu/kernels.json")
    out = parser.parse_args().out
    torch.manual_seed(20)
    records = [record for tokens in TOKENS for record in measure(tokens)]
    records.append(state_write())
    records += prefix.records(torch.device("cuda"))
    results.write(out, "tests.gpu.kernels", records)
    show(records)


if __name__ == "__main__":
    main()
