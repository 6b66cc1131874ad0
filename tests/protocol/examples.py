"""One of every message of version 1, each optional field set somewhere: what the golden frames are of."""

from __future__ import annotations

from protocol.codec import Message
from protocol.geometry import Geometry
from protocol.messages import (
    Ack,
    Bye,
    Describe,
    Description,
    Flush,
    Flushed,
    Heartbeat,
    Hello,
    HelloFirst,
    LifeStory,
    List,
    ListEntry,
    Listing,
    Problem,
    Pull,
    Refused,
    Release,
    Released,
    RequestFinished,
    RoutedExpertsPatch,
    Routes,
    RowsLost,
    Stat,
    Stats,
    Welcome,
)

GEOMETRY = Geometry(num_layers=3, moe_layer_ids=(1, 2), top_k=2, num_experts=8)

# Two segments: row 0 of life "7" prefills and is not clean, row 9 of life "8" is sampled and names the client's id.
PATCH = RoutedExpertsPatch(
    seq=5,
    step=77,
    req_ids=b"\x92\xa17\xa18",
    starts=b"\x00\x00\x00\x00\x09\x00\x00\x00",
    offsets=b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00",
    kinds=b"\x02\x01",
    weight_versions=b"\x03\x00\x00\x00\x03\x00\x00\x00",
    bad_rows=b"\x00\x00\x00\x00",
    opens=((1, "req-é"),),
)

_STORY = LifeStory(
    request_id="req",
    life="7",
    engine_id="engine",
    incarnation="abc",
    state="incomplete",
    reason="",
    rows=2,
    end=4,
    num_tokens=5,
    age_s=1.5,
    missing=((1, 3),),
    weight_spans=((0, 1, 3), (3, 4, 4)),
    provenance=((0, 1, 2), (3, 4, 1)),
    events=((1.5, "opened by engine"),),
    advice="pull it",
)

FROM_ENGINE: dict[str, Message] = {
    "hello": Hello("engine", "abc", GEOMETRY, 0),
    "hello_again": Hello("engine", "abc", GEOMETRY, 300, "state"),
    "patch": PATCH,
    "patch_plain": RoutedExpertsPatch(
        seq=6,
        step=78,
        req_ids=b"\x91\xa18",
        starts=b"\x0a\x00\x00\x00",
        offsets=b"\x00\x00\x00\x00\x01\x00\x00\x00",
        kinds=b"\x01",
        weight_versions=b"\x03\x00\x00\x00",
    ),
    "rows_lost": RowsLost(6, b"\x91\xa17", b"\x01\x00\x00\x00", b"\x02\x00\x00\x00", b"\x01", ((0, "req"),)),
    "flushed": Flushed(7, "7", 42),
    "finished": RequestFinished(8, "7", 42, "stop"),
    "finished_aborted": RequestFinished(9, "8", None, "aborted", "client gone"),
    "heartbeat": Heartbeat(10),
    "bye": Bye(),
}

TO_ENGINE: dict[str, Message] = {
    "welcome": Welcome("state", 3, 1 << 26),
    "ack": Ack("state", 9, 0),
    "hello_first": HelloFirst(),
    "flush": Flush("7", 42),
    "refused": Refused("rows", "row 0 is bad", 12),
    "refused_unread": Refused("version", "expected 1"),
}

FROM_TRAINER: dict[str, Message] = {
    "pull": Pull(1, "req"),
    "pull_sliced": Pull(2, "req", 42, b"0123456789abcdef", 1500, (0, 8), (2, 1), "moe", "uint8", True),
    "release": Release(3, ("a", "b#1")),
    "describe": Describe(4, "req"),
    "list": List(5, "open", 17, 10),
    "stat": Stat(6),
}

TO_TRAINER: dict[str, Message] = {
    "routes": Routes(
        nonce=1,
        request_id="req",
        status="complete",
        num_tokens=3,
        shape=(2, 3, 2),
        dtype="int16",
        layers=(0, 1, 2),
        geometry=GEOMETRY,
        weight_spans=((0, 2, 3),),
        provenance=((0, 1, 2), (1, 2, 1)),
        missing=(),
        trimmed=True,
        row_start=0,
        engine_id="engine",
        token_digest=b"0123456789abcdef",
    ),
    "problem": Problem(2, "incomplete", "req: 2 rows missing", "req", ((1, 3),)),
    "problem_unread": Problem(0, "version", "expected 1"),
    "released": Released(3, 1, 1),
    "description": Description(4, (_STORY,)),
    "listing": Listing(5, (ListEntry("req", "engine", "open", 4, None, 0.25),), 17, 30),
    "stats": Stats(6, {"engines": 1.0}),
}

ROWS = b"\x00\x01\xff\x02" + b"\x03\x04\x05\x06"
TOKENS = b"\x41\x00\x00\x00\x42\x00\x00\x00"
PAYLOAD = bytes(range(24))

OTHER_FRAMES: dict[str, list[bytes]] = {
    "patch": [ROWS, TOKENS],
    "patch_plain": [b"\x07\x00\x01\x02", b"\x43\x00\x00\x00"],
    "routes": [PAYLOAD],
}
"""Frames behind the header; messages not named here have none."""
