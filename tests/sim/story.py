"""Messages in one line, for the story of a world."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol import codec
from protocol.errors import ProtocolError
from protocol.messages import Kind, RoutedExpertsPatch, Routes, RowsLost

_DECODERS = (codec.decode_from_engine, codec.decode_to_engine, codec.decode_from_trainer, codec.decode_to_trainer)


def told(frames: Sequence[bytes]) -> str:
    """What a message says."""
    for decode in _DECODERS:
        try:
            message = decode(frames)
        except ProtocolError:
            continue
        if isinstance(message, RoutedExpertsPatch):
            ends = np.diff(np.frombuffer(message.offsets, "<i4"))
            return f"patch {message.seq}: {_segments(message, ends)} bad {len(message.bad_rows) // 4}"
        if isinstance(message, RowsLost):
            return f"rows lost {message.seq}: {_segments(message, np.frombuffer(message.lengths, '<i4'))}"
        if isinstance(message, Routes):
            told = f"{message.request_id} {message.status} of {message.num_tokens} tokens"
            return f"routes {message.nonce}: {told} {message.shape} from {message.row_start} missing {message.missing}"
        return str(message)
    return "bytes that are no message"


def _segments(message: RoutedExpertsPatch | RowsLost, counts: np.ndarray) -> str:
    try:
        ids = codec.decode_ids(message.req_ids)
    except ProtocolError:
        ids = ["?"] * len(message.kinds)
    starts = np.frombuffer(message.starts, "<i4").tolist()
    names = {int(kind): kind.name.lower() for kind in Kind}
    columns = zip(ids, starts, counts.tolist(), message.kinds, strict=False)
    told = [f"{life}[{a}, {a + n}) {names.get(kind, kind)}" for life, a, n, kind in columns]
    return ", ".join(told) + "".join(f"; opens {ids[i]} as {name}" for i, name in message.opens)
