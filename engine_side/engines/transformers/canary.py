"""The start-up proof on the real engine: each way that continuous batching executes runs once before any request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from engine_side.capture.coverage import Way, poison, prove_coverage
from engine_side.capture.recorder import StepRows
from engine_side.capture.streams import OnStream
from engine_side.engines.transformers.compat import buffer_pairs, clear_pages, forget_graphs, made_up_requests
from engine_side.engines.transformers.processor import ProcessorCapture

_PREFILL, _CHUNK, _BATCH = 8, 5, 3


def prove(captured: ProcessorCapture, model: Any) -> None:
    """Run the canary. Raises CaptureRefused naming the ways and layers that do not report. Leaves nothing behind in the
    cache and the slot store; with CUDA graphs, each way is captured first and then replayed."""
    # One stream for all of it: what poisons, what runs and what reads.
    with captured.stream, _own_random_numbers(captured.processor):
        try:
            ways = [_way(captured, forward) for forward in _forwards(captured.processor, model)]
            prove_coverage(captured.pipeline.recorder.geometry, ways)
        finally:
            captured.forget()


def accompany(processor: Any, model: Any) -> None:
    """Run what `prove` runs on rank 0, on a rank that captures nothing: their forwards meet in collectives."""
    io = processor.inputs_and_outputs
    # As rank 0 does: where one captures a graph, none may replay an older one.
    forget_graphs(io)
    with OnStream(io.compute_stream), _own_random_numbers(processor):
        for forward in _forwards(processor, model):
            # Rank 0 met it as well, at the same place, and says what it means.
            with suppress(RuntimeError):
                forward.run()
    if hasattr(io, "io_pairs"):
        io.current_pair = 0


def _own_random_numbers(processor: Any) -> AbstractContextManager[None]:
    """What dummy forwards sample is not taken from what requests will be sampled with."""
    device = torch.device(processor.model_device)
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    fork: AbstractContextManager[None] = torch.random.fork_rng(devices=devices)
    return fork


def _way(captured: ProcessorCapture, forward: _Forward) -> Way:
    pipeline = captured.pipeline

    def run() -> StepRows:
        """Raises RuntimeError where the cache is too small for it, CaptureError for a bad commit."""
        pipeline.idle()
        forward.run()
        if pipeline.failed is not None:
            raise pipeline.failed
        return pipeline.recorder.rows(forward.num_tokens)

    return Way(forward.name, forward.num_tokens, run, lambda: poison(pipeline.recorder.rows(forward.num_tokens)))


def _forwards(processor: Any, model: Any) -> Iterator[_Forward]:
    """A prefill, a chunk behind a cached prefix, the decode of one token and of a batch, on each set of input buffers,
    twice where the second run replays what the first captured."""
    limit, pairs = processor.cache.max_batch_tokens, buffer_pairs(processor.inputs_and_outputs)
    config = processor.model_runner.cb_config
    graphs = any(config.cuda_graph_booleans)
    batch = min(_BATCH, limit, config.max_requests_per_batch or _BATCH)
    shapes = (
        ("prefill", 1, min(_PREFILL, limit), 0),
        ("chunk after a cached prefix", 1, min(_CHUNK, limit), _PREFILL),
        ("decode of one token", 1, 1, _PREFILL),
        ("decode of a batch", batch, 1, _PREFILL),
    )
    for pair in range(len(pairs)):
        for name, count, new, past in shapes:
            for replay in (False, True) if graphs else (False,):
                words = (name, "captured graph" if replay else "", f"buffers {pair}" if len(pairs) > 1 else "")
                yield _Forward(", ".join(filter(None, words)), processor, model, pair, count, new, past)


@dataclass(frozen=True, slots=True)
class _Forward:
    name: str
    processor: Any
    model: Any
    pair: int
    count: int
    new: int
    past: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.new

    def run(self) -> None:
        """One dummy forward. Raises RuntimeError where the cache is too small for it."""
        processor = self.processor
        cache, io, runner = processor.cache, processor.inputs_and_outputs, processor.model_runner
        futures = made_up_requests(cache, self.count, self.new, self.past)
        try:
            if len(futures) < self.count:
                raise RuntimeError(f"the cache has no room for {self.count} requests of {self.new + self.past} tokens")
            # Their past is made up too: what lay in its pages may be no number, which sampling does not survive.
            clear_pages(cache, [future.state.request_id for future in futures])
            vocabulary = self.model.config.get_text_config().vocab_size
            for i, future in enumerate(futures):
                future.state.tokens_to_process = [(7 * t + i) % vocabulary for t in range(self.new)]
            if hasattr(io, "io_pairs"):
                io.current_pair = self.pair
            fast = self.new == 1 and self.past > 0 and buffer_pairs(io)[self.pair].block_table.numel() > 0
            sizes = runner.maybe_pad_inputs(self.num_tokens, 0 if fast else self.past * self.count, fast)
            io.prepare_batch_tensors(futures, processor.logit_processor, fast, *sizes, runner.pad_inputs)
            with torch.no_grad():
                runner.compute_batch(self.model, io.get_model_kwargs(use_padding=runner.pad_inputs))
            if io.compute_stream is not None:
                io.compute_stream.synchronize()
        finally:
            for future in futures:
                cache.free_blocks(future.state.request_id)
