"""Messages of an emitter made by hand: segments in, frames out, through the real codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import Kind, RoutedExpertsPatch, RowsLost

SMALL = Geometry(num_layers=4, moe_layer_ids=(1, 3), top_k=2, num_experts=8)
WIDE = Geometry(num_layers=3, moe_layer_ids=(0, 1, 2), top_k=3, num_experts=300)


@dataclass(frozen=True)
class Seg:
    """A segment. rows: int16 [n, moe_layers, top_k]. tokens: n ids. bad: indices within the segment that the emitter
    says are not clean. opens: the client's request id, on a life's first segment."""

    life: str
    start: int
    rows: NDArray[np.int16]
    tokens: tuple[int, ...]
    kind: Kind = Kind.FORWARD
    version: int = 0
    bad: tuple[int, ...] = ()
    opens: str | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


def random_rows(rng: np.random.Generator, geometry: Geometry, n: int) -> NDArray[np.int16]:
    """int16 [n, moe_layers, top_k] of distinct ids in range."""
    scores = rng.random((n, *geometry.row_shape[:1], geometry.num_experts))
    return np.argsort(scores, axis=-1)[..., : geometry.top_k].astype(np.int16)


def random_seg(rng: np.random.Generator, geometry: Geometry, life: str, start: int, n: int, **more: Any) -> Seg:
    """A segment of random rows and tokens."""
    tokens = tuple(int(x) for x in rng.integers(0, 2**31, n))
    return Seg(life, start, random_rows(rng, geometry, n), tokens, **more)


def header(seq: int, segs: Sequence[Seg], step: int = 0) -> RoutedExpertsPatch:
    """The header of a patch of these segments."""
    offsets = np.cumsum([0, *(len(seg.rows) for seg in segs)])
    bad = [offsets[i] + at for i, seg in enumerate(segs) for at in seg.bad]
    return RoutedExpertsPatch(
        seq=seq,
        step=step,
        req_ids=codec.encode_ids([seg.life for seg in segs]),
        starts=np.array([seg.start for seg in segs], "<i4").tobytes(),
        offsets=offsets.astype("<i4").tobytes(),
        kinds=bytes(seg.kind for seg in segs),
        weight_versions=np.array([seg.version for seg in segs], "<i4").tobytes(),
        bad_rows=np.array(bad, "<i4").tobytes(),
        opens=tuple((i, seg.opens) for i, seg in enumerate(segs) if seg.opens is not None),
    )


def frames(geometry: Geometry, seq: int, segs: Sequence[Seg], **fields: Any) -> list[bytes]:
    """The three frames of a patch; `fields` replace fields of its header."""
    head = header(seq, segs)
    rows = np.concatenate([np.zeros((0, *geometry.row_shape), np.int16), *(seg.rows for seg in segs)])
    tokens = np.array([token for seg in segs for token in seg.tokens], "<i4")
    return [codec.encode(_replaced(head, fields)), rows.astype(geometry.wire_dtype).tobytes(), tokens.tobytes()]


def rows_lost(seq: int, segs: Sequence[Seg]) -> RowsLost:
    """What stands in the sequence when the rows of these segments were dropped."""
    head = header(seq, segs)
    lengths = np.array([len(seg.rows) for seg in segs], "<i4").tobytes()
    return RowsLost(seq, head.req_ids, head.starts, lengths, head.kinds, head.opens)


def _replaced(head: RoutedExpertsPatch, fields: dict[str, Any]) -> RoutedExpertsPatch:
    values = {name: getattr(head, name) for name in head.__struct_fields__}
    return RoutedExpertsPatch(**(values | fields))
