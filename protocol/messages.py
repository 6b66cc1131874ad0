"""Every message of protocol version 1.

Array-like tagged structs: a field may only ever be appended, because older readers ignore the tail. Columns of
a step (`starts`, `offsets`, …) travel as packed little-endian bytes: one memcpy for a thousand requests, and the
id column of an unchanged decode batch is recognised by comparing bytes instead of decoding them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, TypeAlias

import msgspec

from protocol.geometry import Geometry

Span: TypeAlias = tuple[int, int, int]
"""(start, stop, value): rows [start, stop) share a weight version or a kind."""

Range: TypeAlias = tuple[int, int]
"""Rows [start, stop)."""


class Kind(IntEnum):
    """Provenance of a row. 0 stands for a position that holds nothing."""

    FORWARD = 1
    RECOMPUTE = 2
    CACHED = 3
    REPAIR = 4


FinishReason = Literal["stop", "length", "aborted", "failed"]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages."""


# ---------------------------------------------------------------- engine -> collector


class Hello(_Message, frozen=True, array_like=True, tag=1):
    """First message of a connection. `first_seq` is the lowest number the shipper can still send; `state_id` is the
    collector state it last spoke to ("" if none). A collector of another state asks for `first_seq - 1`, where the
    shipper then puts a `RowsLost` that reopens its live requests as lost from 0."""

    engine_id: str
    incarnation: str
    geometry: Geometry
    first_seq: int
    state_id: str = ""


class RoutedExpertsPatch(_Message, frozen=True, array_like=True, tag=2):
    """Everything one engine step produced; rows and token ids follow as frames 1 and 2.

    n segments over T rows. req_ids: msgpack array of n life ids. starts: int32[n], absolute first positions.
    offsets: int32[n+1] into the rows. kinds: uint8[n]. weight_versions: int32[n]. bad_rows: int32 indices of rows
    that are not clean (they count as missing). opens: (segment index, client request id) for each opening segment.
    """

    seq: int
    step: int
    req_ids: bytes
    starts: bytes
    offsets: bytes
    kinds: bytes
    weight_versions: bytes
    bad_rows: bytes = b""
    opens: tuple[tuple[int, str], ...] = ()


class RowsLost(_Message, frozen=True, array_like=True, tag=3):
    """Stands in the sequence in place of rows that were dropped: the same columns, no rows. lengths: int32[n]."""

    seq: int
    req_ids: bytes
    starts: bytes
    lengths: bytes
    kinds: bytes
    opens: tuple[tuple[int, str], ...] = ()


class Flushed(_Message, frozen=True, array_like=True, tag=4):
    """Answer to `Flush`: every step launched before it was read precedes this number."""

    seq: int
    req_id: str
    num_tokens: int


class RequestFinished(_Message, frozen=True, array_like=True, tag=5):
    """A life's length and end, behind its last row. num_tokens counts prompt and generated tokens, or None where the
    emitter does not know it (aborted only)."""

    seq: int
    req_id: str
    num_tokens: int | None
    reason: FinishReason
    detail: str = ""


class Heartbeat(_Message, frozen=True, array_like=True, tag=6):
    """The emitter is alive and has shipped everything below `next_seq`."""

    next_seq: int


class Bye(_Message, frozen=True, array_like=True, tag=7):
    """The emitter leaves on purpose: what it left unfinished is lost."""


# ---------------------------------------------------------------- collector -> engine


class Welcome(_Message, frozen=True, array_like=True, tag=20):
    """Send from `next_seq` on. window_bytes: how much may be unacknowledged, absolute."""

    state_id: str
    next_seq: int
    window_bytes: int


class Ack(_Message, frozen=True, array_like=True, tag=21):
    """Every message up to and including `logged_seq` is safe."""

    state_id: str
    logged_seq: int
    window_bytes: int


class HelloFirst(_Message, frozen=True, array_like=True, tag=22):
    """The collector does not know this connection: say Hello."""


class Flush(_Message, frozen=True, array_like=True, tag=23):
    """Answer `Flushed` once everything launched until now has been shipped or declared lost."""

    req_id: str
    num_tokens: int


class Refused(_Message, frozen=True, array_like=True, tag=24):
    """A message was not accepted. `seq` is the number it used up (as lost rows), or None."""

    code: str
    message: str
    seq: int | None = None


# ---------------------------------------------------------------- trainer -> collector


class Pull(_Message, frozen=True, array_like=True, tag=40):
    """Ask for one request's rows.

    num_tokens: prompt and generated tokens, if the trainer knows. token_digest: `codec.token_digest` of the first
    num_tokens-1 tokens. rows: [start, stop) of the row axis. layers: global layer ids, in the order wanted.
    partial: also serve an aborted prefix or an incomplete array (missing rows are -1).
    """

    nonce: int
    request_id: str
    num_tokens: int | None = None
    token_digest: bytes | None = None
    timeout_ms: int = 0
    rows: Range | None = None
    layers: tuple[int, ...] | None = None
    axis: Literal["all", "moe"] = "all"
    dtype: Literal["int16", "uint8", "int32"] = "int16"
    partial: bool = False


class Release(_Message, frozen=True, array_like=True, tag=41):
    """The trainer is done with these requests."""

    nonce: int
    request_ids: tuple[str, ...]


class Describe(_Message, frozen=True, array_like=True, tag=42):
    """Ask for the story of one request."""

    nonce: int
    request_id: str


class List(_Message, frozen=True, array_like=True, tag=43):
    """One page of the requests the collector knows, ordered by age; `after` is the cursor of the page before."""

    nonce: int
    state: str = ""
    after: int = 0
    limit: int = 100


class Stat(_Message, frozen=True, array_like=True, tag=44):
    """Ask for the daemon's counters."""

    nonce: int


# ---------------------------------------------------------------- collector -> trainer


class Routes(_Message, frozen=True, array_like=True, tag=60):
    """Header of a served array; the array follows as frame 1, C order, `dtype`, `shape`.

    token_digest: `codec.token_digest` of the num_tokens-1 tokens that the rows consumed (0 where a row is missing).
    """

    nonce: int
    request_id: str
    status: Literal["complete", "aborted", "incomplete"]
    num_tokens: int
    shape: tuple[int, int, int]
    dtype: str
    layers: tuple[int, ...]
    geometry: Geometry
    weight_spans: tuple[Span, ...]
    provenance: tuple[Span, ...]
    missing: tuple[Range, ...]
    trimmed: bool = False
    row_start: int = 0
    engine_id: str = ""
    token_digest: bytes = b""


class Problem(_Message, frozen=True, array_like=True, tag=61):
    """Why a request cannot be served. code is one of `protocol.codes`."""

    nonce: int
    code: str
    message: str
    request_id: str = ""
    missing: tuple[Range, ...] = ()


class Released(_Message, frozen=True, array_like=True, tag=62):
    """How many of the ids of a Release were known."""

    nonce: int
    released: int
    unknown: int


class LifeStory(_Message, frozen=True, array_like=True):
    """One life, for people."""

    request_id: str
    life: str
    engine_id: str
    incarnation: str
    state: str
    reason: str
    rows: int
    end: int
    num_tokens: int | None
    age_s: float
    missing: tuple[Range, ...]
    weight_spans: tuple[Span, ...]
    provenance: tuple[Span, ...]
    events: tuple[tuple[float, str], ...]
    advice: str


class Description(_Message, frozen=True, array_like=True, tag=63):
    """Every life that carries the name asked for."""

    nonce: int
    lives: tuple[LifeStory, ...]


class ListEntry(_Message, frozen=True, array_like=True):
    """One life in a Listing. rows: 1 + the highest position reached."""

    request_id: str
    engine_id: str
    state: str
    rows: int
    num_tokens: int | None
    age_s: float


class Listing(_Message, frozen=True, array_like=True, tag=64):
    """A page; `next` is the cursor of the following one, 0 at the end."""

    nonce: int
    entries: tuple[ListEntry, ...]
    next: int
    total: int


class Stats(_Message, frozen=True, array_like=True, tag=65):
    """Counters and gauges by stable name."""

    nonce: int
    values: dict[str, float]


EngineMessage: TypeAlias = Hello | RoutedExpertsPatch | RowsLost | Flushed | RequestFinished | Heartbeat | Bye
CollectorToEngine: TypeAlias = Welcome | Ack | HelloFirst | Flush | Refused
TrainerMessage: TypeAlias = Pull | Release | Describe | List | Stat
CollectorToTrainer: TypeAlias = Routes | Problem | Released | Description | Listing | Stats
