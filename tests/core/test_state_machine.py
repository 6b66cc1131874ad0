"""The same worlds, the order of what happens chosen by hypothesis, which shrinks a failing one."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.core.worlds import Engine, World

engines = st.integers(0, 1)


class Collecting(RuleBasedStateMachine):
    """Two engines, their networks, trainers and the clock, against the dictionaries of `model.py`."""

    world: World | None = None

    @initialize(seed=st.integers(0, 2**16), pages=st.sampled_from([12, 25, 600]))
    def begin(self, seed: int, pages: int) -> None:
        self.world = World(seed, pages)

    @rule(which=engines)
    def an_engine_runs(self, which: int) -> None:
        self._here.generate(self._engine(which))

    @rule(which=engines)
    def a_network_delivers_repeats_or_skips(self, which: int) -> None:
        self._here.network(self._engine(which))

    @rule()
    def a_trainer_asks_or_releases(self) -> None:
        self._here.trainer()

    @rule()
    def time_passes(self) -> None:
        self._here.time()

    @rule(which=engines)
    def everything_arrives(self, which: int) -> None:
        engine = self._engine(which)
        while not engine.model.stalled and engine.model.applied + 1 < len(engine.log):
            self._here.heartbeat(engine)
            self._here.deliver(engine, engine.model.applied + 1)

    @invariant()
    def every_row_is_the_models(self) -> None:
        if self.world is not None:
            self.world.check()

    @property
    def _here(self) -> World:
        assert self.world is not None
        return self.world

    def _engine(self, which: int) -> Engine:
        return self._here.engines[which]


TestCollecting = Collecting.TestCase
TestCollecting.settings = settings(
    max_examples=40, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
