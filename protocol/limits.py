"""Every bound of the protocol, by name. The decoder enforces them before it trusts a byte."""

from __future__ import annotations

from typing import Final

VERSION: Final = 1
"""First byte of every header frame."""

MAX_HEADER_BYTES: Final = 4 << 20
"""A header of 65,536 segments with 36-character ids is 3 MB; anything larger is an attack or a bug."""

MAX_ROWS_BYTES: Final = 128 << 20
"""One patch: a prefix chunk has 32 MiB; a 64k-token prefill step of a 94x8 model 99 MB."""

MAX_SEQ: Final = 1 << 62
"""First number of an incarnation: counting on from here never leaves the 64 bits that an integer has on the wire."""

MAX_SEGMENTS: Final = 65_536
"""Segments of one patch."""

MAX_ID_CHARS: Final = 512
"""A request id, an engine id or an incarnation."""

MAX_DETAIL_CHARS: Final = 1_024
"""Why a request ended, as kept for people."""

MAX_TOKENS: Final = 1 << 22
"""Positions of one life: 4 M, beyond any published context length."""

MAX_WEIGHT_VERSION: Final = (1 << 24) - 1
"""A weight version shares 8 bytes with the token id and the kind of its row."""

MAX_EXPERTS: Final = 32_767
"""int16 is what is served."""

MAX_LAYERS: Final = 4_096
MAX_TOP_K: Final = 256

MAX_RELEASE_IDS: Final = 65_536
"""Ids of one Release."""

MAX_LIST: Final = 1_000
"""Entries of one page of a Listing."""

MAX_REPLY_BYTES: Final = 256 << 20
"""One Routes payload. A longer request is pulled in row ranges."""

MAX_SPANS: Final = 65_536
"""Ranges of each sort in one answer: three columns of them fit a header."""

MAX_PULL_TIMEOUT_MS: Final = 3_600_000

MAX_WAITING_PULLS: Final = 4_096
"""Pulls that one trainer may leave waiting."""

MAX_UNREAD_ANSWERS: Final = 8_192
"""Answers that may wait for one trainer to read: 200,000 took 226 MB of the collector."""

MAX_UNSENT_BYTES: Final = 64 << 20
"""Rows on their way to trainers, or one answer where that is larger: they are copies, beside the budget."""

MAX_UNSENT_OF_ONE: Final = 16 << 20
"""The same, to one trainer: others are served beside one that does not read."""

MAX_HELD_ANSWERS: Final = 65_536
"""Answers that may wait, for all trainers together, while the log cannot be written."""
