"""A prefix hit of 100,000 tokens: the device memory it takes while it is read back, and what a slot costs for good."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from engine_side.capture.records import RecordLayout
from engine_side.capture.slot_store import SlotStore
from engine_side.export.landing import LandingStep
from engine_side.export.pipeline import CapturePipeline, PrefixHits
from engine_side.export.plan import StepPlan
from engine_side.export.planner import ScheduledBatch
from protocol.geometry import Geometry
from tests.bench.record import Record

MODELS = {
    "DeepSeek-R1": Geometry(61, tuple(range(3, 61)), 8, 256),
    "Qwen3-30B-A3B": Geometry(48, tuple(range(48)), 8, 128),
}
TOKENS, PIECE = 100_000, 4_096
MOST_BYTES = 64 << 20


class Landings:
    """Stands where the shipper does."""

    quiet = False
    asks: tuple[()] = ()

    def __init__(self) -> None:
        self.steps: list[LandingStep] = []

    def put(self, step: LandingStep) -> None:
        self.steps.append(step)

    def lost(self, plan: StepPlan) -> None:
        raise AssertionError(f"step {plan.step} is lost")


def records(device: torch.device, tokens: int = TOKENS) -> Iterator[Record]:
    """Records `prefix/…` and `slot/…`."""
    for name, geometry in MODELS.items():
        yield _hit(name, geometry, device, tokens)
        everything = geometry.num_layers * geometry.top_k * 4
        for narrow in (False, True) if geometry.num_experts <= 255 else (False,):
            each, most = SlotStore.slot_bytes(RecordLayout.of(geometry, narrow)), 0.30 if narrow else 0.52
            dtype = "uint8" if narrow else "int16"
            yield Record(
                f"slot/{name}/{dtype}", "share of int32 of all layers", each / everything, {"bytes": float(each)},
                None, f"at most {most:.2f}", each <= most * everything,
            )  # fmt: skip


def _hit(name: str, geometry: Geometry, device: torch.device, tokens: int) -> Record:
    landings = Landings()
    shipper: Any = landings
    layout = RecordLayout.of(geometry, narrow=False)
    pipeline = CapturePipeline(layout, shipper, max_tokens=PIECE, num_slots=tokens, device=device)
    slots = torch.arange(tokens, device=device)
    ids = torch.rand(PIECE, geometry.num_experts, device=device).topk(geometry.top_k).indices.to(torch.int32)
    for at in range(0, tokens, PIECE):
        part = slots[at : at + PIECE]
        pipeline.begin(1)
        for layer in range(geometry.num_moe_layers):
            pipeline.recorder.keep(layer, ids)
        pipeline.commit(part, part, part)
    every = np.arange(tokens, dtype=np.int32)
    hits = PrefixHits(["hit"], [0], [tokens], [every], [every])
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    began = time.perf_counter()
    pipeline.end(ScheduledBatch(["other"], [tokens], [1], [tokens + 1]), hits)
    handed = time.perf_counter()
    for landing in landings.steps:
        landing.wait()
    landed = time.perf_counter()
    extra = (torch.cuda.max_memory_allocated(device) if cuda else 0) - before
    found = landings.steps[1:]
    whole = sum(len(x.rows) for x in found) == tokens and not any(x.status.any() for x in found)
    peers = {
        "ms until the engine goes on": (handed - began) * 1e3,
        "ms until it has landed": (landed - began) * 1e3,
        "MiB of rows": tokens * layout.stride / (1 << 20),
    }
    for landing in landings.steps:
        landing.free()
    pipeline.free()
    bar = "at most 64 MiB, every row proven"
    return Record(
        f"prefix/{name}/{tokens}", "MiB of device memory, peak", extra / (1 << 20), peers, None, bar,
        whole and extra <= MOST_BYTES,
    )  # fmt: skip
