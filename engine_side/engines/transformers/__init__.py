"""Transformers continuous batching. `capture_routes` turns capture on; off, nothing of it is even imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from engine_side.engines.transformers.capture import RouteCapture


class CaptureOff:
    """What `capture_routes(enabled=False)` yields."""

    enabled = False


def check_config(config: Any, batching: Any = None) -> None:
    """Refuse before any weights load. config: a model's, as `AutoConfig.from_pretrained` gives it; batching: the
    ContinuousBatchingConfig to come. Raises CaptureRefused, as `capture_routes` would with the model in hand."""
    from engine_side.engines.transformers.compat import refuse_config

    refuse_config(config, batching)


@contextmanager
def capture_routes(
    model: Any,
    collector: str,
    enabled: bool = True,
    *,
    engine_id: str | None = None,
    window_cap_bytes: int = 256 << 20,
    on_full: Literal["drop", "wait"] = "drop",
    wait_s: float = 30.0,
    drain_s: float = 10.0,
    keys: Path | str | None = None,
) -> Iterator[RouteCapture | CaptureOff]:
    """Within the block, every continuous-batching run of `model` ships its routes to `collector`.

    model: a Hugging Face MoE model; call `generate_batch`, `init_continuous_batching` or
    `continuous_batching_context_manager` on it inside the block. collector: the engines' endpoint of a collector, which
    may start later. engine_id: a stable name of this engine (default: host and process). window_cap_bytes: rows held
    while the collector is away: from half of it on, the youngest requests lose rows, and get back what their KV slots
    still prove. on_full "wait": before that, hold the engine for at most `wait_s` seconds an outage. drain_s:
    how long the end of the block waits until everything is acknowledged. keys: an engine's key folder, as
    `r3-collector keygen` made it, for a collector that serves with keys.

    Request ids are the engine's own; with num_return_sequences=n > 1 they are `protocol.ids.sibling_id(id, i)` with
    i = 0 for the request itself and 1 to n-1 for its children.

    A model that tensor parallelism spreads over several ranks: enter the block on every rank, with the same arguments.
    Rank 0 ships; the others set no hook and hold no row, but leave the same room for rows in their KV caches.

    Raises CaptureRefused, before anything is installed, for a model, version or configuration that it cannot vouch for.
    """
    if not enabled:
        yield CaptureOff()
        return
    from engine_side.engines.transformers.capture import RouteCapture

    with RouteCapture(model, collector, engine_id, drain_s, window_cap_bytes, on_full, wait_s, keys) as capture:
        yield capture
