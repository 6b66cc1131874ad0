"""The actor with a real Ray: an engine's shipper and a trainer's client in this process, the daemon in Ray's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import ray

from collector.client import RouteClient
from collector.client.errors import ReleasedRequest
from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.shipper import Shipper
from protocol.geometry import Geometry
from protocol.messages import Kind

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

GEOMETRY = Geometry(4, (1, 2), 2, 8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_actor_serves_what_an_engine_shipped(cluster: None, seed: int) -> None:
    from collector.ray.actor import RouteCollectorActor

    actor = RouteCollectorActor.remote(budget=16 << 20)
    endpoints = ray.get(actor.endpoints.remote())
    rows = np.random.default_rng(seed).permuted(np.tile(np.arange(8), (5, 2, 1)), axis=2)[:, :, :2].astype(np.int16)
    plan = StepPlan(
        1,
        ("1",),
        np.array([0], np.int32),
        np.array([0, 5], np.int32),
        np.array([Kind.FORWARD], np.uint8),
        3,
        ((0, "prompt-a"),),
    )
    tokens = np.arange(5, dtype=np.int32)
    clean = np.zeros(5, np.uint8)
    shipper = Shipper(endpoints.engines, GEOMETRY, "engine-0")
    shipper.start()
    shipper.put(LandingStep(plan, rows, tokens, tokens.copy(), clean, None, lambda: None, lambda: None))
    shipper.finish("1", 6, "stop")
    try:
        with RouteClient(endpoints.trainers, timeout=30.0) as client:
            routes = client.pull("prompt-a", num_tokens=6)
            assert routes.array.shape == (5, 4, 2)
            assert np.array_equal(routes.array[:, [1, 2]], rows)
            assert routes.weight_spans == ((0, 5, 3),)
            assert ray.get(actor.healthy.remote())
            assert ray.get(actor.stats.remote())["requests_complete"] == 1
            assert ray.get(actor.release.remote(["prompt-a", "never-seen"])) == 1
            with pytest.raises(ReleasedRequest):
                client.pull("prompt-a", timeout=0.0)
        assert shipper.close(10.0)
    finally:
        shipper.close(0.0)
    assert ray.get(actor.stop.remote())
