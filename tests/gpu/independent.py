"""An independent record of what routers chose: every step copied as it ran, by nothing of ours.

Routers' forwards are wrapped, not hooked, and copy their ids into memory of the witness; under a CUDA graph the copy is
part of the graph. Behind each step those are cloned on the engine's stream, with the positions the forward used. Which
row belongs to which request comes from the engine's batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.continuous_batching import continuous_api


@dataclass
class Step:
    """One launched step. entries: (request id, tokens, whether it samples), in batch order."""

    entries: list[tuple[str, int, bool]]
    ids: torch.Tensor
    positions: torch.Tensor


@dataclass
class Witness:
    """Rows by request and position, each with whether it was sampled from, in the order they ran."""

    replays: int = 0
    steps: list[Step] = field(default_factory=list)
    rows: dict[str, dict[int, list[tuple[NDArray[np.int64], bool]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def settle(self) -> None:
        """Read everything back, once the engine is done."""
        for step in self.steps:
            ids, positions = step.ids.cpu().numpy().astype(np.int64), step.positions.cpu().tolist()
            at = 0
            for request, count, samples in step.entries:
                for i in range(count):
                    row = ids[:, at + i].copy()
                    self.rows[request][positions[at + i]].append((row, samples and i == count - 1))
                at += count
        self.steps.clear()

    def expected(self, request: str, position: int) -> NDArray[np.int64] | None:
        """The row [moe_layers, top_k] that a request must be served: the forward that was last sampled from, else the
        first that ran. None: it never ran this position itself."""
        found = self.rows[request].get(position)
        if not found:
            return None
        sampled = [row for row, samples in found if samples]
        return sampled[-1] if sampled else found[0][0]

    def ran_elsewhere(self, row: NDArray[np.int64], position: int) -> bool:
        """Whether some request ran exactly this row at this position."""
        return any(np.array_equal(row, other) for by in self.rows.values() for other, _ in by.get(position, []))


@contextmanager
def watching(routers: dict[int, Any], max_tokens: int, top_k: int, device: torch.device) -> Iterator[Witness]:
    """Within the block, every step of every engine is recorded. Enter it before capture, and before any graph."""
    witness = Witness()
    memory = torch.zeros((len(routers), max_tokens, top_k), dtype=torch.int32, device=device)
    processor = continuous_api.ContinuousBatchProcessor
    step, replay = processor._generation_step, torch.cuda.CUDAGraph.replay

    def copying(index: int, forward: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            ids = output[2].flatten(0, -2)
            memory[index, : len(ids)].copy_(ids)
            return output

        return wrapped

    def generation_step(self: Any, model: Any) -> None:
        step(self, model)
        io = self.inputs_and_outputs
        if hasattr(io, "io_pairs"):
            pair = io.io_pairs[1 - io.current_pair]
            futures, inputs, stream = pair.host_io.requests_in_batch, pair.device_io, io.compute_stream
        else:
            futures, inputs, stream = io.requests_in_batch, io, io.compute_stream
        entries = [(f.state.request_id, f.query_length, f.has_new_token) for f in futures]
        total = sum(count for _, count, _ in entries)
        with torch.cuda.stream(stream):
            witness.steps.append(
                Step(entries, memory[:, :total].clone(), inputs.position_ids.reshape(-1)[:total].clone())
            )

    def counted(self: Any) -> None:
        witness.replays += 1
        replay(self)

    for index, router in enumerate(routers.values()):
        router.forward = copying(index, router.forward)
    processor._generation_step = generation_step
    torch.cuda.CUDAGraph.replay = counted
    try:
        yield witness
    finally:
        processor._generation_step = step
        torch.cuda.CUDAGraph.replay = replay
        for router in routers.values():
            del router.forward
