"""`open_patch` against a decoder of plain loops, and what it refuses."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec, limits
from protocol.errors import ProtocolError
from protocol.geometry import Geometry
from protocol.messages import Kind, RoutedExpertsPatch, RowsLost
from protocol.patch import Patch, loss_of, open_loss, open_patch
from tests.harness.patches import SMALL, WIDE, Seg, frames, random_rows, random_seg, rows_lost

Row = tuple[tuple[int, ...], int, int, int, bool]
"""Cells (-1 where uncaptured), token, kind, weight version, clean."""


def opened(geometry: Geometry, parts: list[bytes]) -> Patch:
    head = codec.decode_from_engine(parts)
    assert isinstance(head, RoutedExpertsPatch)
    return open_patch(head, parts[1], parts[2], geometry)


def naive(geometry: Geometry, parts: list[bytes]) -> dict[tuple[int, str, int], Row]:
    """(segment, life, position) -> row, by struct.unpack and loops."""
    head = codec.decode_from_engine(parts)
    assert isinstance(head, RoutedExpertsPatch)
    lives = codec.decode_ids(head.req_ids)
    n, total = len(lives), len(parts[2]) // 4
    starts = struct.unpack(f"<{n}i", head.starts)
    offsets = struct.unpack(f"<{n + 1}i", head.offsets)
    versions = struct.unpack(f"<{n}i", head.weight_versions)
    declared = struct.unpack(f"<{len(head.bad_rows) // 4}i", head.bad_rows)
    tokens = struct.unpack(f"<{total}i", parts[2])
    per_row = geometry.num_moe_layers * geometry.top_k
    code = "B" if geometry.num_experts <= 255 else "h"
    cells = struct.unpack(f"<{total * per_row}{code}", parts[1])
    found: dict[tuple[int, str, int], Row] = {}
    for i, life in enumerate(lives):
        for t in range(offsets[i], offsets[i + 1]):
            row = tuple(-1 if c == 255 and code == "B" else c for c in cells[t * per_row : (t + 1) * per_row])
            clean = t not in declared and -1 not in row
            found[i, life, starts[i] + t - offsets[i]] = (row, tokens[t], head.kinds[i], versions[i], clean)
    return found


def through_numpy(geometry: Geometry, patch: Patch) -> dict[tuple[int, str, int], Row]:
    lives = codec.decode_ids(patch.ids)
    bad = set(patch.bad.tolist())
    found: dict[tuple[int, str, int], Row] = {}
    for i, life in enumerate(lives):
        for t in range(patch.offsets[i], patch.offsets[i + 1]):
            cells = np.frombuffer(patch.rows[t].tobytes(), geometry.wire_dtype).astype(np.int16)
            cells[cells == 255] = -1 if geometry.wire_dtype.itemsize == 1 else 255
            at = int(patch.starts[i] + t - patch.offsets[i])
            found[i, life, at] = (
                tuple(cells.tolist()),
                int(np.int32(patch.token_ids[t])),
                int(patch.kinds[i]),
                int(patch.tags[i]) >> 32 & 0xFFFFFF,
                t not in bad,
            )
    return found


@st.composite
def segments(draw: st.DrawFn, geometry: Geometry) -> list[Seg]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    segs = []
    for _ in range(draw(st.integers(0, 6))):
        n = draw(st.integers(1, 5))
        seg = random_seg(
            rng,
            geometry,
            draw(st.sampled_from(["a", "b", "é", "long" * 20])),
            draw(st.integers(0, limits.MAX_TOKENS - n)),
            n,
            kind=draw(st.sampled_from(Kind)),
            version=draw(st.integers(0, limits.MAX_WEIGHT_VERSION)),
            bad=tuple(sorted(draw(st.sets(st.integers(0, n - 1), max_size=2)))),
            opens=draw(st.none() | st.just("client")),
        )
        for _ in range(draw(st.integers(0, 2))):
            seg.rows[draw(st.integers(0, n - 1)), draw(st.integers(0, geometry.num_moe_layers - 1))] = -1
        segs.append(seg)
    return segs


@pytest.mark.parametrize("geometry", [SMALL, WIDE], ids=["uint8", "int16"])
@given(data=st.data())
def test_a_patch_opens_to_what_a_loop_reads(geometry: Geometry, data: st.DataObject) -> None:
    segs = data.draw(segments(geometry))
    parts = frames(geometry, 3, segs)
    patch = opened(geometry, parts)
    assert through_numpy(geometry, patch) == naive(geometry, parts)
    ones = all(len(s.rows) == 1 and s.kind is Kind.FORWARD and s.opens is None for s in segs)
    assert patch.plain == (ones and not len(patch.bad))


@pytest.mark.parametrize("geometry", [SMALL, WIDE], ids=["uint8", "int16"])
@given(data=st.data())
def test_no_damage_to_the_columns_raises_anything_but_a_protocol_error(geometry: Geometry, data: st.DataObject) -> None:
    parts = frames(geometry, 3, data.draw(segments(geometry)))
    head = codec.decode_from_engine(parts)
    assert isinstance(head, RoutedExpertsPatch)
    field = data.draw(st.sampled_from(["starts", "offsets", "kinds", "weight_versions", "bad_rows", "rows", "tokens"]))
    if field in ("rows", "tokens"):
        parts[1 + (field == "tokens")] = data.draw(st.binary(max_size=64))
        fields = {}
    else:
        fields = {field: data.draw(st.binary(max_size=64))}
    broken = RoutedExpertsPatch(**({name: getattr(head, name) for name in head.__struct_fields__} | fields))
    try:
        patch = open_patch(broken, parts[1], parts[2], geometry)
    except ProtocolError as error:
        assert error.reason in ("columns", "rows")
        try:
            loss_of(broken)
        except ProtocolError as again:
            assert again.reason == "columns"
    else:
        assert len(patch.rows) == len(patch.token_ids) == patch.offsets[-1]
        assert patch.starts.min(initial=0) >= 0


def _one(geometry: Geometry = SMALL, n: int = 2) -> Seg:
    return random_seg(np.random.default_rng(0), geometry, "a", 4, n)


I4 = lambda *values: np.array(values, "<i4").tobytes()  # noqa: E731

REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "start below 0": ("columns", "positions", {"starts": I4(-1)}),
    "start beyond the last position": ("columns", "positions", {"starts": I4(limits.MAX_TOKENS - 1)}),
    "two starts": ("columns", "starts", {"starts": I4(1, 2)}),
    "starts of odd size": ("columns", "starts", {"starts": b"\x00\x00\x00"}),
    "no offsets": ("columns", "segments", {"offsets": b""}),
    "offsets do not begin at 0": ("columns", "offsets", {"offsets": I4(1, 2)}),
    "offsets descend": ("columns", "offsets", {"offsets": I4(0, -2)}),
    "an empty segment": ("columns", "offsets", {"offsets": I4(0, 0)}),
    "offsets of more segments": ("columns", "starts", {"offsets": I4(0, 1, 2)}),
    "offsets of more rows": ("rows", "expected 3 rows", {"offsets": I4(0, 3)}),
    "offsets of fewer rows": ("rows", "expected 1 rows", {"offsets": I4(0, 1)}),
    "kind 0": ("columns", "kinds", {"kinds": b"\x00"}),
    "kind 5": ("columns", "kinds", {"kinds": b"\x05"}),
    "no kind": ("columns", "kinds", {"kinds": b""}),
    "weight version below 0": ("columns", "weight", {"weight_versions": I4(-1)}),
    "weight version too large": ("columns", "weight", {"weight_versions": I4(limits.MAX_WEIGHT_VERSION + 1)}),
    "no weight version": ("columns", "weight", {"weight_versions": b""}),
    "a bad row that is none": ("columns", "bad_rows", {"bad_rows": I4(2)}),
    "a bad row below 0": ("columns", "bad_rows", {"bad_rows": I4(-1)}),
    "opens no segment": ("columns", "opens", {"opens": ((1, "x"),)}),
    "opens a segment below 0": ("columns", "opens", {"opens": ((-1, "x"),)}),
    "opens under no name": ("columns", "1 to", {"opens": ((0, ""),)}),
    "opens under a long name": ("columns", "1 to", {"opens": ((0, "x" * 513),)}),
}


@pytest.mark.parametrize(("reason", "text", "fields"), REFUSED.values(), ids=REFUSED)
def test_columns_that_contradict_each_other_are_refused(reason: str, text: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=text) as caught:
        opened(SMALL, frames(SMALL, 0, [_one()], **fields))
    assert caught.value.reason == reason


@pytest.mark.parametrize("geometry", [SMALL, WIDE], ids=["uint8", "int16"])
def test_rows_of_another_size_or_dtype_are_refused_with_both_sizes(geometry: Geometry) -> None:
    head, rows, tokens = frames(geometry, 0, [_one(geometry)])
    other = np.frombuffer(rows, geometry.wire_dtype).astype("<i4").tobytes()
    for wrong in (b"", rows[:-1], rows + rows, other):
        with pytest.raises(ProtocolError, match=f"= {len(rows)} bytes, found {len(wrong)}") as caught:
            opened(geometry, [head, wrong, tokens])
        assert caught.value.reason == "rows"
    for wrong in (b"", tokens[:-1], tokens + tokens):
        with pytest.raises(ProtocolError, match="token_ids") as caught:
            opened(geometry, [head, rows, wrong])
        assert caught.value.reason == "columns"


@pytest.mark.parametrize(("geometry", "value"), [(SMALL, 8), (SMALL, 254), (WIDE, 300), (WIDE, 32_767), (WIDE, -2)])
def test_an_expert_that_does_not_exist_is_refused_and_named(geometry: Geometry, value: int) -> None:
    seg = _one(geometry)
    seg.rows[1, 1, 0] = value
    layer = geometry.moe_layer_ids[1]
    with pytest.raises(ProtocolError, match=f"row 1, layer {layer}: expert .* of {geometry.num_experts}") as caught:
        opened(geometry, frames(geometry, 0, [seg]))
    assert caught.value.reason == "rows"
    patch = opened(geometry, frames(geometry, 0, [replace(seg, bad=(1,))]))
    assert patch.bad.tolist() == [1], "a row declared not clean may hold anything"


@pytest.mark.parametrize("geometry", [SMALL, WIDE], ids=["uint8", "int16"])
def test_an_uncaptured_cell_makes_its_row_a_bad_one_unasked(geometry: Geometry) -> None:
    seg = _one(geometry, 4)
    seg.rows[2, 0, 1] = -1
    assert opened(geometry, frames(geometry, 0, [replace(seg, bad=(0,))])).bad.tolist() == [0, 2]
    seg = _one(geometry, 1)
    seg.rows[0, 0, 0] = -1
    assert not opened(geometry, frames(geometry, 0, [seg])).plain


def test_rows_above_the_limit_are_refused_as_oversized() -> None:
    big = Geometry(64, tuple(range(64)), 8, 32_767)
    n = limits.MAX_ROWS_BYTES // big.row_nbytes + 1
    head = codec.decode_from_engine(frames(big, 0, [_one(big)], offsets=I4(0, n)))
    assert isinstance(head, RoutedExpertsPatch)
    with pytest.raises(ProtocolError, match=str(limits.MAX_ROWS_BYTES)) as caught:
        open_patch(head, np.zeros(n * big.row_nbytes, np.uint8).data, bytes(4 * n), big)
    assert caught.value.reason == "oversized"


# ------------------------------------------------------------------ losses


def test_a_loss_has_the_columns_of_the_rows_it_stands_for() -> None:
    rng = np.random.default_rng(1)
    segs = [
        random_seg(rng, SMALL, "a", 3, 2, kind=Kind.RECOMPUTE, opens="client"),
        random_seg(rng, SMALL, "b", 0, 5),
    ]
    for loss in (open_loss(rows_lost(0, segs)), loss_of(_head(segs))):
        assert codec.decode_ids(loss.ids) == ["a", "b"]
        assert loss.starts.tolist() == [3, 0]
        assert loss.counts.tolist() == [2, 5]
        assert loss.kinds.tolist() == [2, 1]
        assert loss.opens == ((0, "client"),)


@pytest.mark.parametrize(
    "fields",
    [
        {"starts": I4(-1)},
        {"starts": I4(limits.MAX_TOKENS)},
        {"starts": b""},
        {"lengths": I4(0)},
        {"lengths": I4(-1)},
        {"lengths": b"\x01"},
        {"kinds": b"\x07"},
        {"kinds": b""},
        {"opens": ((1, "x"),)},
        {"opens": ((0, ""),)},
    ],
)
def test_a_loss_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    lost = rows_lost(0, [_one()])
    with pytest.raises(ProtocolError) as caught:
        open_loss(RowsLost(**({name: getattr(lost, name) for name in lost.__struct_fields__} | fields)))
    assert caught.value.reason == "columns"


def _head(segs: list[Seg]) -> RoutedExpertsPatch:
    head = codec.decode_from_engine(frames(SMALL, 0, segs))
    assert isinstance(head, RoutedExpertsPatch)
    return head


def test_random_rows_are_what_a_router_gives() -> None:
    rows = random_rows(np.random.default_rng(2), WIDE, 50)
    assert rows.shape == (50, *WIDE.row_shape)
    assert rows.min() >= 0
    assert rows.max() < WIDE.num_experts
    assert all(len(set(layer)) == WIDE.top_k for row in rows.tolist() for layer in row)
