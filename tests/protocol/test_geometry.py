"""A geometry that cannot be is refused by name; the wire dtype is the narrowest that holds all ids and "uncaptured"."""

from __future__ import annotations

import numpy as np
import pytest

from protocol import limits
from protocol.errors import GeometryError
from protocol.geometry import UNCAPTURED, WIRE_UNCAPTURED_U8, Geometry

GOOD = (4, (1, 3), 2, 8)


@pytest.mark.parametrize(
    ("field", "geometry"),
    [
        ("num_layers", Geometry(0, (0,), 2, 8)),
        ("num_layers", Geometry(limits.MAX_LAYERS + 1, (0,), 2, 8)),
        ("num_experts", Geometry(4, (1,), 1, 0)),
        ("num_experts", Geometry(4, (1,), 2, limits.MAX_EXPERTS + 1)),
        ("top_k", Geometry(4, (1,), 0, 8)),
        ("top_k", Geometry(4, (1,), 9, 8)),
        ("top_k", Geometry(4, (1,), limits.MAX_TOP_K + 1, 1000)),
        ("moe_layer_ids", Geometry(4, (), 2, 8)),
        ("moe_layer_ids", Geometry(4, (1, 1), 2, 8)),
        ("moe_layer_ids", Geometry(4, (3, 1), 2, 8)),
        ("moe_layer_ids", Geometry(4, (-1, 1), 2, 8)),
        ("moe_layer_ids", Geometry(4, (1, 4), 2, 8)),
    ],
)
def test_an_impossible_geometry_is_refused_by_the_field_at_fault(field: str, geometry: Geometry) -> None:
    with pytest.raises(GeometryError, match=field):
        geometry.validate()


def test_the_bounds_themselves_are_fine() -> None:
    for geometry in (
        Geometry(*GOOD),
        Geometry(1, (0,), 1, 1),
        Geometry(limits.MAX_LAYERS, tuple(range(limits.MAX_LAYERS)), limits.MAX_TOP_K, limits.MAX_EXPERTS),
    ):
        assert geometry.validate() is geometry


@pytest.mark.parametrize(("experts", "dtype"), [(8, "u1"), (255, "u1"), (256, "<i2"), (32_767, "<i2")])
def test_the_wire_holds_every_id_and_uncaptured(experts: int, dtype: str) -> None:
    geometry = Geometry(4, (1, 3), 2, experts)
    assert geometry.wire_dtype == np.dtype(dtype)
    assert geometry.row_shape == (2, 2)
    assert geometry.row_nbytes == 4 * np.dtype(dtype).itemsize
    sent = np.array([0, experts - 1, UNCAPTURED], np.int16)
    wire = sent.astype(geometry.wire_dtype)
    back = wire.astype(np.int16)
    if geometry.wire_dtype.itemsize == 1:
        back[wire == WIRE_UNCAPTURED_U8] = UNCAPTURED
    assert back.tolist() == sent.tolist()
    assert len(set(wire.tolist())) == 3, "no id looks like uncaptured"
