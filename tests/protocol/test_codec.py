"""What is not a message is a `ProtocolError` with a stable reason; what is, comes back as it was."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol import codec, limits
from protocol.codec import Message
from protocol.errors import ProtocolError
from protocol.geometry import Geometry
from protocol.ids import escape, sibling_id
from protocol.messages import Heartbeat, Hello, Pull, Release, RoutedExpertsPatch, Routes
from tests.protocol.examples import FROM_ENGINE, FROM_TRAINER, OTHER_FRAMES, TO_ENGINE, TO_TRAINER

Decode = Callable[[Sequence[bytes]], Message]
DECODERS: dict[str, tuple[Decode, dict[str, Message]]] = {
    "from engine": (codec.decode_from_engine, FROM_ENGINE),
    "to engine": (codec.decode_to_engine, TO_ENGINE),
    "from trainer": (codec.decode_from_trainer, FROM_TRAINER),
    "to trainer": (codec.decode_to_trainer, TO_TRAINER),
}
V = bytes([limits.VERSION])

# The header says 4 billion elements, or nests, or is of another shape; none may cost memory or another exception.
BROKEN_HEADERS = {
    "nothing": b"",
    "truncated": codec.encode(Heartbeat(1 << 40))[1:-1],
    "array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "string of 4 GB": b"\xdb\xff\xff\xff\xff",
    "nested 100,000 deep": b"\x91" * 100_000 + b"\x01",
    "nested where a newer peer's field would be": b"\x93\x06\x01" + b"\x91" * 100_000 + b"\x01",
    "nested maps": b"\x81\xa1a" * 50_000 + b"\xc0",
    "no tag": b"\x90",
    "unknown tag": b"\x91\x63",
    "tag of another type": b"\x91\xa3abc",
    "an object": b"\x80",
    "an integer beyond 64 bits": b"\x92\x06\xc7\x09\x00" + b"\xff" * 9,
    "text that is not UTF-8": b"\x94\x04\x01\xa2\xff\xfe\x05",
    "text for a number": b"\x92\x06\xa2hi",
    "too few fields": b"\x92\x04\x01",
    "a float for a number": b"\x92\x06\xcb" + b"\x3f" * 8,
    "trailing bytes": b"\x92\x06\x01\x01",
    "reserved byte": b"\xc1",
}


@pytest.mark.parametrize("side", DECODERS)
@pytest.mark.parametrize("header", BROKEN_HEADERS.values(), ids=BROKEN_HEADERS)
def test_a_header_that_is_no_message_is_refused_as_header(side: str, header: bytes) -> None:
    decode, _ = DECODERS[side]
    with pytest.raises(ProtocolError, match="header does not decode") as caught:
        decode([V + header])
    assert caught.value.reason == "header"


@pytest.mark.parametrize("side", DECODERS)
@pytest.mark.parametrize("first", [b"", b"\x00", b"\x02", b"\xff", b"\x92"])
def test_another_version_is_named_with_ours_and_theirs(side: str, first: bytes) -> None:
    decode, _ = DECODERS[side]
    with pytest.raises(ProtocolError, match=f"expected protocol version {limits.VERSION}, found") as caught:
        decode([first + b"\x91\x07"])
    assert caught.value.reason == ("version")
    with pytest.raises(ProtocolError) as caught:
        decode([first])
    assert caught.value.reason == "version"


@pytest.mark.parametrize("side", DECODERS)
def test_an_oversized_header_is_refused_before_it_is_decoded(side: str) -> None:
    decode, _ = DECODERS[side]
    bomb = V + b"\xdd\x00\x10\x00\x00" + b"\x90" * limits.MAX_HEADER_BYTES
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=str(limits.MAX_HEADER_BYTES)) as caught:
        decode([bomb])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reason == "oversized"
    assert peak < 100_000


@pytest.mark.parametrize("side", DECODERS)
def test_the_number_of_frames_is_fixed_by_the_type(side: str) -> None:
    decode, examples = DECODERS[side]
    for name, message in examples.items():
        frames = [codec.encode(message), *OTHER_FRAMES.get(name, [])]
        for wrong in ([frames[0]] if len(frames) > 1 else [], [*frames, b""], [*frames, b"x", b"y"]):
            with pytest.raises(ProtocolError) as caught:
                decode(wrong)
            assert caught.value.reason == "frames"


@pytest.mark.parametrize("side", DECODERS)
def test_a_message_on_the_wrong_socket_is_refused(side: str) -> None:
    decode, own = DECODERS[side]
    for _, examples in DECODERS.values():
        for name, message in examples.items():
            if examples is not own:
                with pytest.raises(ProtocolError) as caught:
                    decode([codec.encode(message), *OTHER_FRAMES.get(name, [])])
                assert caught.value.reason == "header"


@given(st.lists(st.binary(max_size=300), max_size=4), st.sampled_from(list(DECODERS)), st.booleans())
def test_no_bytes_raise_anything_but_a_protocol_error(frames: list[bytes], side: str, versioned: bool) -> None:
    decode, _ = DECODERS[side]
    try:
        decode([V + frames[0], *frames[1:]] if versioned and frames else frames)
    except ProtocolError as error:
        assert error.reason in ("version", "header", "frames", "oversized")


@given(st.sampled_from(sorted(FROM_ENGINE)), st.data())
def test_a_damaged_message_raises_nothing_but_a_protocol_error(name: str, data: st.DataObject) -> None:
    frame = bytearray(codec.encode(FROM_ENGINE[name]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    try:
        codec.decode_from_engine([damaged, *OTHER_FRAMES.get(name, [])])
    except ProtocolError as error:
        assert error.reason in ("version", "header", "frames")


# ------------------------------------------------------------------ round trips

IDS = st.text(min_size=1, max_size=limits.MAX_ID_CHARS)
U64 = st.integers(0, 2**64 - 1)
RANGES = st.tuples(U64, U64)
SPANS = st.lists(st.tuples(U64, U64, U64), max_size=5).map(tuple)
GEOMETRIES = st.builds(
    Geometry,
    num_layers=st.integers(1, limits.MAX_LAYERS),
    moe_layer_ids=st.lists(st.integers(0, limits.MAX_LAYERS), max_size=9).map(tuple),
    top_k=st.integers(1, limits.MAX_TOP_K),
    num_experts=st.integers(1, limits.MAX_EXPERTS),
)


@given(
    st.builds(Hello, engine_id=IDS, incarnation=IDS, geometry=GEOMETRIES, first_seq=U64, state_id=st.text())
    | st.builds(
        RoutedExpertsPatch,
        seq=U64,
        step=U64,
        req_ids=st.binary(),
        starts=st.binary(),
        offsets=st.binary(),
        kinds=st.binary(),
        weight_versions=st.binary(),
        bad_rows=st.binary(),
        opens=st.lists(st.tuples(U64, IDS), max_size=3).map(tuple),
    )
)
def test_engine_messages_come_back(message: Message) -> None:
    extra = [b"", b""] if isinstance(message, RoutedExpertsPatch) else []
    assert codec.decode_from_engine([codec.encode(message), *extra]) == message


@given(
    st.builds(
        Pull,
        nonce=U64,
        request_id=st.text(),
        num_tokens=st.none() | st.integers(-(2**63), 2**64 - 1),
        token_digest=st.none() | st.binary(),
        timeout_ms=U64,
        rows=st.none() | RANGES,
        layers=st.none() | st.lists(U64, max_size=4).map(tuple),
        axis=st.sampled_from(["all", "moe"]),
        dtype=st.sampled_from(["int16", "uint8", "int32"]),
        partial=st.booleans(),
    )
    | st.builds(Release, nonce=U64, request_ids=st.lists(st.text(), max_size=4).map(tuple))
)
def test_trainer_messages_come_back(message: Message) -> None:
    assert codec.decode_from_trainer([codec.encode(message)]) == message


@given(
    st.builds(
        Routes,
        nonce=U64,
        request_id=IDS,
        status=st.sampled_from(["complete", "aborted", "incomplete"]),
        num_tokens=U64,
        shape=st.tuples(U64, U64, U64),
        dtype=st.text(),
        layers=st.lists(U64, max_size=5).map(tuple),
        geometry=GEOMETRIES,
        weight_spans=SPANS,
        provenance=SPANS,
        missing=st.lists(RANGES, max_size=5).map(tuple),
        trimmed=st.booleans(),
        row_start=U64,
        engine_id=IDS,
        token_digest=st.binary(),
    )
)
def test_answers_come_back(message: Routes) -> None:
    assert codec.decode_to_trainer([codec.encode(message), b""]) == message


# ------------------------------------------------------------------ the id column and digests


@given(st.lists(IDS, max_size=40))
def test_the_id_column_comes_back(ids: list[str]) -> None:
    assert codec.decode_ids(codec.encode_ids(ids)) == ids


@pytest.mark.parametrize(
    "column",
    [
        b"",
        b"\x91",
        b"\x91\x07",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x91\xa2\xff\xfe",
        codec.encode_ids([""]),
        codec.encode_ids(["x" * (limits.MAX_ID_CHARS + 1)]),
        codec.encode_ids(["a"] * (limits.MAX_SEGMENTS + 1)),
    ],
)
def test_a_bad_id_column_is_refused_as_columns(column: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_ids(column)
    assert caught.value.reason == "columns"


def test_an_id_column_may_be_as_full_as_the_limits_say() -> None:
    assert len(codec.decode_ids(codec.encode_ids(["a"] * limits.MAX_SEGMENTS))) == limits.MAX_SEGMENTS
    assert codec.check_id("é" * limits.MAX_ID_CHARS) == "é" * limits.MAX_ID_CHARS


def test_a_step_of_the_largest_size_the_limits_allow_fits_a_header() -> None:
    n = limits.MAX_SEGMENTS
    ids = codec.encode_ids([f"{i:036d}" for i in range(n)])
    patch = RoutedExpertsPatch(1, 1, ids, bytes(4 * n), bytes(4 * n + 4), bytes(n), bytes(4 * n))
    assert codec.decode_from_engine([codec.encode(patch), b"", b""]) == patch


def test_a_digest_is_over_int32_little_endian_whatever_the_input_is() -> None:
    expected = "5fb69bb48fe9257904199029dd5240f9"
    tokens = [1, 2, 70_000, 2**31 - 1]
    assert codec.token_digest(tokens).hex() == expected
    for dtype in ("<i4", ">i4", "<i8", "<u4"):
        assert codec.token_digest(np.array(tokens, dtype)).hex() == expected
    assert codec.token_digest(np.repeat(np.array(tokens, "<i4"), 2)[::2]).hex() == expected
    assert codec.token_digest(tokens[:3]).hex() != expected
    assert len(codec.token_digest([])) == 16


NAMES = st.text() | st.text("a#%235", max_size=5)
"""Any; and those that look like the escape of another."""


@given(NAMES, NAMES, st.integers(0, 99), st.integers(0, 99))
@example("a#", "a%23", 0, 0)
def test_siblings_of_different_requests_never_share_a_name(a: str, b: str, i: int, j: int) -> None:
    assert (sibling_id(a, i) == sibling_id(b, j)) == (a == b and i == j)
    assert "#" not in escape(a)
    assert (escape(a) == escape(b)) == (a == b)
    assert sibling_id("chat-1", 3) == "chat-1#3"
