"""What the parts for a GPU measure is looked at on any machine, at a size that takes no time."""

from __future__ import annotations

import torch

from tests.gpu import prefix


def test_a_prefix_hit_is_whole_and_slots_cost_what_is_said() -> None:
    found = {record.name: record for record in prefix.records(torch.device("cpu"), tokens=9_000)}
    assert all(record.holds for record in found.values()), found
    assert set(found) == {
        "prefix/DeepSeek-R1/9000",
        "slot/DeepSeek-R1/int16",
        "prefix/Qwen3-30B-A3B/9000",
        "slot/Qwen3-30B-A3B/int16",
        "slot/Qwen3-30B-A3B/uint8",
    }
