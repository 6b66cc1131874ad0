"""The start-up proof on the real engine: each way that continuous batching executes runs once before any request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine_side.capture.coverage import Way, poison, prove_coverage
from engine_side.capture.recorder import StepRows
from engine_side.engines.transformers.compat import buffer_pairs, clear_pages, made_up_requests
from engine_side.engines.transformers.processor import ProcessorCapture

_PREFILL, _CHUNK, _BATCH = 8, 5, 3


def prove(captured: ProcessorCapture, model: Any) -> None:
    """Run the canary. Raises CaptureRefused naming the ways and layers that do not report. Leaves nothing behind in the
    cache and the slot store; with CUDA graphs, each way is captured first and then replayed."""
    # One stream for all of it: what poisons, what runs and what reads.
    with captured.stream:
        try:
            prove_coverage(captured.pipeline.recorder.geometry, list(_ways(captured, model)))
        finally:
            captured.forget()


def _ways(captured: ProcessorCapture, model: Any) -> Iterator[Way]:
    """A prefill, a chunk behind a cached prefix, the decode of one token and of a batch, on each set of input buffers,
    twice where the second run replays what the first captured."""
    processor = captured.processor
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
                way = _Way(captured, model, pair, count, new, past)
                yield Way(", ".join(filter(None, words)), way.num_tokens, way.run, way.poison)


@dataclass(frozen=True, slots=True)
class _Way:
    captured: ProcessorCapture
    model: Any
    pair: int
    count: int
    new: int
    past: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.new

    def poison(self) -> None:
        poison(self.captured.pipeline.recorder.rows(self.num_tokens))

    def run(self) -> StepRows:
        """One dummy forward. Raises RuntimeError where the cache is too small for it, CaptureError for a bad commit."""
        cache, pipeline = self.captured.processor.cache, self.captured.pipeline
        futures = made_up_requests(cache, self.count, self.new, self.past)
        try:
            if len(futures) < self.count:
                raise RuntimeError(f"the cache has no room for {self.count} requests of {self.new + self.past} tokens")
            # Their past is made up too: what lay in its pages may be no number, which sampling does not survive.
            clear_pages(cache, [future.state.request_id for future in futures])
            self._forward(futures, self.past, self.new)
        finally:
            for future in futures:
                cache.free_blocks(future.state.request_id)
        if pipeline.failed is not None:
            raise pipeline.failed
        return pipeline.recorder.rows(self.num_tokens)

    def _forward(self, futures: list[Any], past: int, new: int) -> None:
        """`new` tokens of each request behind `past` of its own."""
        processor = self.captured.processor
        io, runner, count = processor.inputs_and_outputs, processor.model_runner, len(futures)
        vocabulary = self.model.config.get_text_config().vocab_size
        for i, future in enumerate(futures):
            future.query_length, future.state.position_offset = new, past
            future.state.tokens_to_process = [(7 * (past + t) + i) % vocabulary for t in range(new)]
        if hasattr(io, "io_pairs"):
            io.current_pair = self.pair
        fast = new == 1 and past > 0 and buffer_pairs(io)[self.pair].block_table.numel() > 0
        sizes = runner.maybe_pad_inputs(count * new, 0 if fast else past * count, fast)
        self.captured.pipeline.idle()
        io.prepare_batch_tensors(futures, processor.logit_processor, fast, *sizes, runner.pad_inputs)
        with torch.no_grad():
            runner.compute_batch(self.model, io.get_model_kwargs(use_padding=runner.pad_inputs))
        if io.compute_stream is not None:
            io.compute_stream.synchronize()
