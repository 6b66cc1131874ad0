"""Version 1 on the wire is these bytes, for ever: a peer built last year must still be understood.

To add a message: put it into `examples.py`, run this test, and copy the bytes that it prints into `golden.json`. An
entry that exists never changes: a change that turns this red needs a new protocol version, or a new field at the end
of a message and a new entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import pytest

from protocol import codec, messages
from protocol.codec import Message
from protocol.patch import open_patch
from tests.protocol.examples import (
    FROM_ENGINE,
    FROM_TRAINER,
    GEOMETRY,
    OTHER_FRAMES,
    PATCH,
    ROWS,
    TO_ENGINE,
    TO_TRAINER,
    TOKENS,
)

GOLDEN: dict[str, list[str]] = json.loads((Path(__file__).parent / "golden.json").read_text())
DIRECTIONS: list[tuple[dict[str, Message], object, Callable[[Sequence[bytes]], Message]]] = [
    (FROM_ENGINE, messages.EngineMessage, codec.decode_from_engine),
    (TO_ENGINE, messages.CollectorToEngine, codec.decode_to_engine),
    (FROM_TRAINER, messages.TrainerMessage, codec.decode_from_trainer),
    (TO_TRAINER, messages.CollectorToTrainer, codec.decode_to_trainer),
]
CASES = [
    pytest.param(name, message, decode, id=name)
    for examples, _, decode in DIRECTIONS
    for name, message in examples.items()
]


@pytest.mark.parametrize(("name", "message", "decode"), CASES)
def test_a_message_is_exactly_these_bytes_and_they_are_that_message(
    name: str, message: Message, decode: Callable[[Sequence[bytes]], Message]
) -> None:
    frames = [codec.encode(message), *OTHER_FRAMES.get(name, [])]
    assert [frame.hex() for frame in frames] == GOLDEN.get(name)
    assert decode([bytes.fromhex(frame) for frame in GOLDEN[name]]) == message


def test_every_message_of_every_direction_has_an_example_and_no_golden_frame_is_an_orphan() -> None:
    for examples, union, _ in DIRECTIONS:
        assert {type(message) for message in examples.values()} == set(get_args(union))
    assert set(GOLDEN) == {name for examples, _, _ in DIRECTIONS for name in examples}


def test_tags_are_distinct_over_all_directions() -> None:
    """A message on the wrong socket must never decode as another one."""
    kinds = [kind for _, union, _ in DIRECTIONS for kind in get_args(union)]
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(tags)) == len(kinds) == 23


def test_the_golden_patch_opens_to_its_rows() -> None:
    patch = open_patch(PATCH, ROWS, TOKENS, GEOMETRY)
    assert codec.decode_ids(patch.ids) == ["7", "8"]
    assert patch.starts.tolist() == [0, 9]
    assert patch.counts.tolist() == [1, 1]
    assert patch.kinds.tolist() == [2, 1]
    assert (patch.tags >> 32 & 0xFFFFFF).tolist() == [3, 3]
    assert patch.bad.tolist() == [0]
    assert patch.token_ids.tolist() == [0x41, 0x42]
    assert [row.tobytes() for row in patch.rows] == [ROWS[:4], ROWS[4:]]
    assert patch.opens == ((1, "req-é"),)
    assert not patch.plain


def test_a_field_appended_by_a_newer_peer_is_ignored() -> None:
    frame = bytearray.fromhex(GOLDEN["heartbeat"][0])
    assert frame[1] == 0x92, "an array of tag and one field"
    frame[1] = 0x93
    assert codec.decode_from_engine([bytes(frame) + b"\xa3new"]) == messages.Heartbeat(10)
