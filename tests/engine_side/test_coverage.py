"""The start-up canary: an engine that does not capture every layer in every way it executes does not start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine_side.capture.coverage import POISON, Way, poison, prove_coverage, uncaptured_mask
from engine_side.capture.errors import CaptureRefused
from engine_side.capture.records import DUPLICATE_EXPERT, OUT_OF_RANGE, UNCAPTURED_LAYER, UNPROVEN
from protocol.geometry import Geometry
from tests.harness.decoders import EXPERTS, HIDDEN, TOP_K, Decoder, PlainTopKRouter
from tests.harness.tiny import load_tiny
from tests.harness.ways import Captured, ways_of_causal_lm

MOE = (1, 2, 3, 4, 5, 6)  # of the tiny model's 8 layers, the first and the last are dense
NAMES = ["prefill", "chunk after a cached prefix", "decode of one token", "decode of a batch", "verify"]


def _refusal(geometry: Geometry, ways: list[Way]) -> dict[str, str]:
    """What the canary says of each way that failed."""
    with pytest.raises(CaptureRefused) as caught:
        prove_coverage(geometry, ways)
    first, *lines, _way_out = str(caught.value).splitlines()
    assert first == f"routes are not captured in {len(lines)} of {len(ways)} ways the engine executes:"
    return dict(line.strip().split(": ", 1) for line in lines)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_tiny()


@pytest.fixture
def tokens(seed: int) -> Tensor:
    return torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def decoder(seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(layers=6, dense=[0, 5])


def _decoder_ways(captured: Captured) -> list[Way]:
    def forward(num_tokens: int) -> Callable[[], object]:
        return lambda: captured.model(torch.randn(num_tokens, HIDDEN))

    return [captured.way(f"{n} tokens", n, forward(n)) for n in (1, 4)]


def _route_inside_at_one_token(block: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes a Qwen3-MoE block do as fused decode kernels do: for one token it routes by the gate's weight, without
    calling the gate. Returns the token counts that it routed inside."""
    plain, gate, inside = block.forward, block.gate, []

    def forward(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        if len(flat) != 1:
            return plain(hidden)
        inside.append(len(flat))
        weights, ids = functional.linear(flat, gate.weight).float().softmax(-1).topk(gate.top_k, dim=-1)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return block.experts(flat, ids, weights.to(flat.dtype)).reshape(hidden.shape)

    monkeypatch.setattr(block, "forward", forward)
    return inside


def test_a_model_that_reports_everywhere_starts(tiny: Any, tokens: Tensor) -> None:
    captured = Captured(tiny)
    assert captured.geometry.moe_layer_ids == MOE
    ways = ways_of_causal_lm(captured, tokens)
    assert [way.name for way in ways] == NAMES
    prove_coverage(captured.geometry, ways)
    assert captured.recorder.commit_no == len(ways)


def test_routing_inside_a_kernel_at_decode_of_one_token_names_that_way_and_that_layer(
    tiny: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        expected = tiny(tokens[:1, :1]).logits
    inside = _route_inside_at_one_token(tiny.model.layers[4].mlp, monkeypatch)
    with torch.inference_mode():  # it computes what it computed before: only capture can tell
        torch.testing.assert_close(tiny(tokens[:1, :1]).logits, expected)
    inside.clear()
    captured = Captured(tiny)
    ways = ways_of_causal_lm(captured, tokens)
    assert _refusal(captured.geometry, ways) == {"decode of one token": "layer 4 did not report"}
    assert inside == [1]
    prove_coverage(captured.geometry, [way for way in ways_of_causal_lm(captured, tokens) if way.num_tokens > 1])


def test_a_refusal_names_every_way_its_layers_in_ranges_and_the_way_out(
    tiny: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in (1, 3, 4, 5):
        _route_inside_at_one_token(tiny.model.layers[layer].mlp, monkeypatch)
    captured = Captured(tiny)
    ways = ways_of_causal_lm(captured, tokens, verified=1)
    said = "layers 1, 3-5 did not report"
    assert _refusal(captured.geometry, ways) == {"decode of one token": said, "verify": said}
    with pytest.raises(CaptureRefused, match=r"fused, monolithic or quantised .* before compile and graph capture"):
        prove_coverage(captured.geometry, ways_of_causal_lm(captured, tokens))


def test_a_path_around_the_router_names_its_layer(decoder: Decoder) -> None:
    captured = Captured(decoder)
    block = decoder.layers[2].mlp
    block.forward = lambda hidden: hidden + (hidden @ block.gate.weight.T) @ block.experts[0]
    said = "layer 2 did not report"
    assert _refusal(captured.geometry, _decoder_ways(captured)) == {"1 tokens": said, "4 tokens": said}


def test_a_router_replaced_after_capture_was_installed_names_its_layer(decoder: Decoder) -> None:
    captured = Captured(decoder)
    decoder.layers[3].mlp.gate = PlainTopKRouter()
    said = "layer 3 did not report"
    assert _refusal(captured.geometry, _decoder_ways(captured)) == {"1 tokens": said, "4 tokens": said}
    prove_coverage(captured.geometry, _decoder_ways(Captured(decoder)))


@pytest.mark.parametrize(
    "output",
    [
        lambda logits, weights, ids: (weights, ids),
        lambda logits, weights, ids: (logits, weights, ids.float()),
        lambda logits, weights, ids: (logits, weights, ids[:, 0]),
        lambda logits, weights, ids: ids,
    ],
)
def test_a_module_named_like_a_router_that_returns_something_else_names_its_layer(
    decoder: Decoder, output: Callable[..., object]
) -> None:
    gate = decoder.layers[1].mlp.gate
    plain = gate.forward
    gate.forward = lambda hidden: output(*plain(hidden))
    decoder.layers[1].mlp.forward = lambda hidden: (gate(hidden), hidden)[1]
    captured = Captured(decoder)
    said = "layer 1 did not report"
    assert _refusal(captured.geometry, _decoder_ways(captured)) == {"1 tokens": said, "4 tokens": said}


@pytest.mark.parametrize("shared", [EXPERTS, 0])  # numbered behind the others, or as one of them
def test_a_shared_experts_column_in_front_is_refused(decoder: Decoder, shared: int) -> None:
    gate = decoder.layers[2].mlp.gate
    plain = gate.forward

    def with_shared_expert(hidden: Tensor) -> Any:
        logits, weights, ids = plain(hidden)
        first = torch.full_like(ids[:, :1], shared)
        return logits, torch.cat([torch.ones_like(weights[:, :1]), weights], -1), torch.cat([first, ids], -1)

    gate.forward = with_shared_expert
    captured = Captured(decoder)
    said = f"layer 2 chose experts outside [0, {EXPERTS})"
    assert _refusal(captured.geometry, _decoder_ways(captured)) == {"1 tokens": said, "4 tokens": said}


def test_zeros_of_the_right_shape_are_refused(decoder: Decoder) -> None:
    """What an output buffer shows that a kernel never wrote."""
    for layer in (1, 2, 4):
        gate = decoder.layers[layer].mlp.gate
        plain = gate.forward
        gate.forward = lambda hidden, plain=plain: (*plain(hidden)[:2], torch.zeros(len(hidden), TOP_K, dtype=int))
    captured = Captured(decoder)
    said = "layers 1-2, 4 chose an expert twice"
    assert _refusal(captured.geometry, _decoder_ways(captured)) == {"1 tokens": said, "4 tokens": said}


def test_a_way_that_raises_is_named_and_the_others_still_run(decoder: Decoder) -> None:
    captured = Captured(decoder)
    ran = []

    def broken() -> Rows:
        raise RuntimeError("no kernel image is available")

    ways = [
        Way("graph of 8", 8, broken),
        *_decoder_ways(captured),
        captured.way("two forwards", 4, lambda: [decoder(torch.randn(4, HIDDEN)) for _ in range(2)]),
        Way("last", 1, lambda: ran.append(1)),
    ]
    assert _refusal(captured.geometry, ways) == {
        "graph of 8": "RuntimeError: no kernel image is available",
        "two forwards": "CaptureError: layer 1: its router ran 2 times in one forward",
        "last": "the commit did not run",
    }
    assert ran == [1]
    with pytest.raises(CaptureRefused) as caught:
        prove_coverage(captured.geometry, ways)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_no_way_at_all_proves_nothing(decoder: Decoder) -> None:
    captured = Captured(decoder)
    with pytest.raises(CaptureRefused, match="no way of executing was run"):
        prove_coverage(captured.geometry, [])
    none = captured.way("nothing", 0, lambda: decoder(torch.randn(0, HIDDEN)))
    assert _refusal(captured.geometry, [none]) == {"nothing": "0 tokens prove nothing"}


GEOMETRY = Geometry(9, (2, 3, 4, 7), 2, 8)


@dataclass
class Rows:
    """What a commit left."""

    rows: Tensor
    status: Tensor


def _clean(num_tokens: int, dtype: torch.dtype = torch.int16) -> Rows:
    rows = torch.arange(2).to(dtype).expand(num_tokens, *GEOMETRY.row_shape).clone()
    return Rows(rows, torch.zeros(num_tokens).byte())


class Static:
    """What a graph keeps: commits write here, in a view with gaps between the rows."""

    def __init__(self, num_tokens: int, dtype: torch.dtype) -> None:
        clean = _clean(num_tokens, dtype)
        layers, top_k = GEOMETRY.row_shape
        self.wide = torch.zeros(num_tokens, layers, top_k + 6, dtype=dtype)
        self.step = replace(clean, rows=self.wide[:, :, :top_k])

    def replay(self, commits: bool = True, rows: slice = slice(None)) -> Rows:
        if commits:
            self.step.rows[rows] = torch.arange(2).to(self.step.rows.dtype)
            self.step.status[rows] = 0
        return self.step

    def poison(self) -> None:
        poison(self.step)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_a_graph_that_was_captured_before_capture_was_installed_commits_nothing(dtype: torch.dtype) -> None:
    static = Static(3, dtype)
    static.replay()  # rows of an earlier forward that look right
    ways = [
        Way("graph before", 3, lambda: static.replay(commits=False), static.poison),
        Way("graph", 3, static.replay, static.poison),
        # Without a poison of its own: what the way before it left is not taken for its rows.
        Way("graph before, again", 3, lambda: static.replay(commits=False)),
        Way("graph of fewer", 3, lambda: static.replay(rows=slice(0, 1)), static.poison),
    ]
    assert _refusal(GEOMETRY, ways) == {
        "graph before": "the commit did not run",
        "graph before, again": "the commit did not run",
        "graph of fewer": "rows 1-2 not committed",
    }
    assert (static.wide[:, :, 2:] == 0).all()


def test_rows_committed_in_inference_mode_can_be_poisoned() -> None:
    with torch.inference_mode():
        step = _clean(2)
    poison(step)
    assert step.status.tolist() == [POISON, POISON]
    assert uncaptured_mask(step.rows).all()


def test_rows_not_committed_and_layers_that_did_not_report_are_both_named() -> None:
    step = _bent(torch.int16, [0, UNCAPTURED_LAYER, POISON], (1, 3, 0, -1), (1, 3, 1, -1))
    assert _refusal(GEOMETRY, [Way("verify", 3, lambda: step)]) == {
        "verify": "row 2 not committed; layer 7 did not report"
    }


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_missing_ids_of_both_encodings(dtype: torch.dtype) -> None:
    rows = torch.tensor([[[0, -1], [7, 3]]], dtype=torch.int16).to(dtype)
    assert uncaptured_mask(rows).tolist() == [[[False, True], [False, False]]]


def _bent(dtype: torch.dtype, status: list[int], *cells: tuple[int, int, int, int]) -> Rows:
    step = _clean(len(status), dtype)
    for row, layer, column, value in cells:
        step.rows[row, layer, column] = torch.tensor(value, dtype=torch.int16).to(dtype)
    step.status.copy_(torch.tensor(status))
    return step


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
@pytest.mark.parametrize(
    ("status", "cells", "said"),
    [
        ([0, 1], [(1, 3, 0, -1), (1, 3, 1, -1)], "layer 7 did not report"),
        ([0, 0], [(1, 3, 1, -1)], "layer 7 did not report"),  # whatever the status says
        ([2, 0], [(0, 0, 1, 0)], "layer 2 chose an expert twice"),
        ([0, 0], [(0, 0, 1, 0)], "layer 2 chose an expert twice"),
        ([4, 0], [(0, 2, 0, -1)], "layer 4 chose experts outside [0, 8)"),
        ([4, 0], [(0, 2, 0, -1), (0, 2, 1, -1)], "layer 4 chose experts outside [0, 8)"),
        ([0, 0], [(0, 2, 0, 8)], "layer 4 chose experts outside [0, 8)"),
        (
            [5, 0],
            [(0, 0, 0, -1), (0, 0, 1, -1), (0, 1, 0, -1)],
            "layer 2 did not report; layer 3 chose experts outside [0, 8)",
        ),
        ([2, 4], [(0, 3, 0, 1), (1, 0, 0, -1)], "layer 7 chose an expert twice; layer 2 chose experts outside [0, 8)"),
        ([0, UNPROVEN], [], "row 1 of status 0x08"),
        ([DUPLICATE_EXPERT, OUT_OF_RANGE | UNCAPTURED_LAYER], [], "rows 0-1 of status 0x02, 0x05"),
    ],
)
def test_every_fault_is_named_with_its_layer(
    dtype: torch.dtype, status: list[int], cells: list[tuple[int, int, int, int]], said: str
) -> None:
    way = Way("decode", 2, lambda: _bent(dtype, status, *cells))
    assert _refusal(GEOMETRY, [way]) == {"decode": said}
    prove_coverage(GEOMETRY, [Way("decode", 2, lambda: _clean(2, dtype))])


def test_another_number_of_rows_or_another_shape_is_refused() -> None:
    wrong = _clean(4)
    ways = [
        Way("padded", 3, lambda: _clean(4)),
        Way("short", 4, lambda: _clean(3)),
        Way("narrow", 4, lambda: replace(wrong, rows=wrong.rows[:, 1:])),
        Way("unlike", 4, lambda: replace(wrong, status=wrong.status[:2])),
    ]
    assert _refusal(GEOMETRY, ways) == {
        "padded": "4 rows and 4 statuses for 3 tokens",
        "short": "3 rows and 3 statuses for 4 tokens",
        "narrow": "rows of shape [3, 2], expected [4, 2]",
        "unlike": "4 rows and 2 statuses for 4 tokens",
    }


def test_layers_are_named_in_ranges() -> None:
    geometry = Geometry(62, tuple(range(3, 61)), 2, 8)

    def silent() -> Rows:
        rows = torch.full((1, *geometry.row_shape), -1, dtype=torch.int16)
        return replace(_clean(1), rows=rows, status=torch.tensor([UNCAPTURED_LAYER], dtype=torch.uint8))

    assert _refusal(geometry, [Way("decode", 1, silent)]) == {"decode": "layers 3-60 did not report"}
