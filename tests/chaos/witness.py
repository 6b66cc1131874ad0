"""What each request's rows and tokens are: a function of its name, known without asking anybody."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from tests.harness.patches import SMALL, random_rows

MAX_ROWS = 48


class Witness:
    """rows: int16 [n, moe_layers, top_k]; tokens: int32[n + 1], the last of which has no row."""

    def __init__(self, seed: int, request_id: str) -> None:
        rng = np.random.default_rng([seed, zlib.crc32(request_id.encode())])
        count = int(rng.integers(1, MAX_ROWS + 1))
        self.rows: NDArray[np.int16] = random_rows(rng, SMALL, count)
        self.tokens: NDArray[np.int32] = rng.integers(0, 2**31, count + 1).astype(np.int32)
        self.prompt = int(rng.integers(1, count + 1))
        """Rows that its first step brings."""
