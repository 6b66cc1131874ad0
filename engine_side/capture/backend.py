"""Which implementation of commit and read a device takes."""

from __future__ import annotations

import os
from types import ModuleType

import torch


def backend_of(device: torch.device) -> ModuleType:
    """`fused` on a GPU (CUDA, ROCm) that has Triton, `plain` everywhere else. TRITON_INTERPRET=1 runs the kernels on a
    CPU, for tests."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        try:
            from engine_side.capture import fused
        except ImportError:
            pass
        else:
            return fused
    from engine_side.capture import plain

    return plain
