"""One random world: engines, networks and trainers by chance, and the dictionaries of `model.py` beside the core."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from collector.core.events import Effect
from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import Flush, Flushed, Heartbeat, Kind, Refused, RequestFinished, Welcome
from tests.core.driver import Bench, Emitter, engine_messages, held
from tests.core.model import DEAD, Model, ModelEngine, ModelLife
from tests.harness.patches import SMALL, WIDE, Seg, frames, random_seg, rows_lost

GRACE, TTL = 3.0, 25.0


@dataclass
class Run:
    """One life as its engine sees it: the position that the next forward consumes."""

    life: str
    name: str
    next: int
    over: bool = False


@dataclass
class Engine:
    """An engine and the log of everything it wants delivered; cursor: what goes out next."""

    emitter: Emitter
    model: ModelEngine
    log: list[tuple[list[bytes], Callable[[], Any]]] = field(default_factory=list)
    cursor: int = 0
    runs: list[Run] = field(default_factory=list)


class World:
    """A bench, its model, and chance."""

    def __init__(self, seed: int, pages: int = 0) -> None:
        self.chance = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.pages = pages or self.chance.choice([12, 25, 600])
        self.bench = Bench(self.pages, grace_s=GRACE, ttl_s=TTL)
        self.model = Model(self.pages, self.bench.now)
        self.engines = [self._engine(f"e{i}", geometry) for i, geometry in enumerate((SMALL, WIDE))]
        self.stalled_at: dict[int, float] = {}
        self.shedding = False
        self.watched: dict[int, tuple[ModelLife, int, float]] = {}
        # By identity; the life is kept, or another would be born under it.
        self.names = 0
        self.seen: Counter[str] = Counter()

    def _engine(self, name: str, geometry: Geometry) -> Engine:
        emitter = Emitter(self.bench, name, geometry)
        (welcome,) = emitter.hello()
        assert isinstance(welcome, Welcome)
        assert welcome.next_seq == 0
        per_page = self.bench.core.arena.layout(geometry).rows_per_page
        assert per_page in (2, 4), "pages must be small for their borders to be met"
        return Engine(emitter, ModelEngine(geometry, per_page))

    # ------------------------------------------------------------------ the engines

    def generate(self, engine: Engine) -> None:
        """Append one message of an engine's life to its log."""
        kind = self.chance.choices(
            ["step", "finish", "fill", "lost", "refused", "garbled", "second"], [60, 14, 8, 4, 2, 0.3, 4]
        )[0]
        live = [run for run in engine.runs if not run.over]
        over = [run for run in engine.runs if run.over]
        if kind == "finish" and live:
            self._finish(engine, self.chance.choice(live))
        elif kind == "second" and over:
            run = self.chance.choice(over)
            self._append_finish(engine, run.life, run.next + self.chance.randint(-2, 2), "stop")
        elif kind == "fill" and engine.runs:
            segs = self._fills(engine)
            self._append(engine, segs, lambda: self.model.patch(engine.model, segs))
        else:
            segs = self._step(engine)
            if kind == "lost":
                self._append_message(
                    engine, lambda seq: rows_lost(seq, segs), lambda: self.model.lost(engine.model, segs)
                )
            elif kind == "refused" and segs:
                self._append(engine, segs, lambda: self.model.lost(engine.model, segs), spoil=lambda f: f[1][:-1])
            elif kind == "garbled" and segs:
                self._append(engine, segs, lambda: self.model.lose_all(engine.model), kinds=b"\x09" * len(segs))
            else:
                self._append(engine, segs, lambda: self.model.patch(engine.model, segs))

    def _step(self, engine: Engine) -> list[Seg]:
        """New requests' prefills, resumed ones, chunks and decode rows with drafts, as one batch."""
        segs: list[Seg] = []
        alive = [run for run in engine.runs if not run.over]
        surplus = [run for run in engine.runs[-4:] if run.over and self.chance.random() < 0.2]
        for run in [r for r in alive if self.chance.random() < 0.9] + surplus:
            if self.chance.random() < 0.05 and run.next > 1:
                at = self.chance.randrange(run.next)
                segs.append(self._seg(engine, run.life, at, run.next - at, Kind.RECOMPUTE))
            n = self.chance.choice([1, 1, 1, 1, 1, 2, 3])
            segs.append(self._seg(engine, run.life, run.next, n))
            run.next = max(0, run.next + self.chance.randint(1, n))
        if (len(alive) < 4 and self.chance.random() < 0.5) or not segs:
            segs += self._opening(engine)
        return segs

    def _opening(self, engine: Engine) -> list[Seg]:
        self.names += 1
        again = self.names > 2 and self.chance.random() < 0.15
        name = f"r{self.chance.randint(max(0, self.names - 4), self.names) if again else self.names}"
        run = Run(f"{self.names}", name, self.chance.randint(1, 7))
        engine.runs.append(run)
        cached = self.chance.choice([0, 0, self.chance.randrange(run.next)])
        parts = [(0, cached, Kind.CACHED), (cached, run.next - 1, Kind.RECOMPUTE)]
        segs = [self._seg(engine, run.life, a, b - a, kind) for a, b, kind in parts if b > a]
        segs.append(self._seg(engine, run.life, run.next - 1, 1))
        segs[0] = replace(segs[0], opens=name)
        return segs

    def _fills(self, engine: Engine) -> list[Seg]:
        run = self.chance.choice(engine.runs[-6:])
        start = self.chance.randrange(run.next + 1)
        kind = self.chance.choice([Kind.CACHED, Kind.REPAIR, Kind.RECOMPUTE])
        return [self._seg(engine, run.life, start, self.chance.randint(1, 8), kind)]

    def _seg(self, engine: Engine, life: str, start: int, n: int, kind: Kind = Kind.FORWARD) -> Seg:
        bad = (self.chance.randrange(n),) if self.chance.random() < 0.04 else ()
        version = self.chance.choice([0, 1, (1 << 24) - 1])
        seg = random_seg(self.rng, engine.model.geometry, life, start, n, kind=kind, bad=bad, version=version)
        if self.chance.random() < 0.03:
            seg.rows[self.chance.randrange(n), 0, 0] = -1
        return seg

    def _finish(self, engine: Engine, run: Run) -> None:
        run.over = True
        reason = self.chance.choices(["stop", "length", "aborted", "failed"], [5, 5, 3, 1])[0]
        exact: int | None = run.next + 1 + self.chance.choice([0, 0, 0, 0, -1, 1])
        if (reason == "aborted" and self.chance.random() < 0.5) or self.chance.random() < 0.03:
            exact = None
        self._append_finish(engine, run.life, exact, reason)

    def _append_finish(self, engine: Engine, life: str, num_tokens: int | None, reason: Any) -> None:
        def apply() -> None:
            found = engine.model.lives.get(life)
            if found is not None:
                found.finish(num_tokens, reason)

        self._append_message(engine, lambda seq: RequestFinished(seq, life, num_tokens, reason), apply)

    def _append(
        self,
        engine: Engine,
        segs: list[Seg],
        apply: Callable[[], Any],
        spoil: Callable[[list[bytes]], bytes] | None = None,
        **fields: Any,
    ) -> None:
        parts = frames(engine.model.geometry, len(engine.log), segs, **fields)
        if spoil is not None:
            parts[1] = spoil(parts)
        engine.log.append((parts, apply))

    def _append_message(self, engine: Engine, message: Callable[[int], Any], apply: Callable[[], Any]) -> None:
        engine.log.append(([codec.encode(message(len(engine.log)))], apply))

    # ------------------------------------------------------------------ the network

    def deliver(self, engine: Engine, seq: int) -> None:
        """Message `seq` arrives, in turn or not."""
        parts, apply = engine.log[seq]
        stalls = False
        deaths = self.model.deaths
        if seq == engine.model.applied + 1 and not engine.model.stalled and engine.model.connected:
            if apply() is False:
                stalls = True
            else:
                engine.model.applied = seq
                engine.model.opening.clear()
        if self.model.deaths > deaths:
            self._resume()
        effects = self.bench.from_engine(engine.emitter.peer, parts)
        if stalls:
            self.stalled_at[id(engine)] = self.bench.now
            self.seen["stall"] += 1
        self.heed(effects)

    def heed(self, effects: list[Effect]) -> None:
        """What the engines' shippers do about effects."""
        for engine in self.engines:
            for message in engine_messages(effects, engine.emitter.peer):
                if isinstance(message, Welcome):
                    assert message.next_seq == engine.model.applied + 1
                    engine.cursor = message.next_seq
                elif isinstance(message, Refused):
                    self.seen["refused"] += 1
                elif isinstance(message, Flush):
                    self._answer_flush(engine, message)

    def _answer_flush(self, engine: Engine, flush: Flush) -> None:
        def apply() -> None:
            life = engine.model.lives.get(flush.req_id)
            if life is not None:
                life.flushed(flush.num_tokens)
                self.seen["barrier"] += 1

        self._append_message(engine, lambda seq: Flushed(seq, flush.req_id, flush.num_tokens), apply)

    def network(self, engine: Engine) -> None:
        fault = self.chance.random()
        if fault < 0.06 and engine.cursor:
            self.deliver(engine, self.chance.randrange(engine.cursor))
            self.seen["repeat"] += 1
        elif fault < 0.1 and engine.cursor < len(engine.log):
            engine.cursor += 1
            self.seen["gap"] += 1
        elif fault < 0.16:
            self.heartbeat(engine)
        elif fault < 0.19:
            self._reconnect(engine)
        elif engine.cursor < len(engine.log):
            engine.cursor += 1
            self.deliver(engine, engine.cursor - 1)

    def heartbeat(self, engine: Engine) -> None:
        self.heed(self.bench.from_engine(engine.emitter.peer, [codec.encode(Heartbeat(engine.cursor))]))

    def _reconnect(self, engine: Engine) -> None:
        """A new connection: whatever was under way is gone."""
        emitter = engine.emitter
        engine.model.stalled = False
        self.stalled_at.pop(id(engine), None)
        applied = engine.model.applied
        answer = emitter.hello(self.chance.randint(0, applied + 1), "state", peer=self.rng.bytes(5))
        for message in answer:
            if isinstance(message, Welcome):
                assert message.next_seq == applied + 1
                engine.cursor = message.next_seq
        self.seen["reconnect"] += 1

    # ------------------------------------------------------------------ trainers and time

    def trainer(self) -> None:
        names = [life.name for life in self.model.lives if self.chance.random() < 0.9]
        name = self.chance.choice(names or [f"r{self.chance.randint(1, self.names + 1)}"])
        if self.chance.random() < 0.12:
            known = self.model.release(name)
            self.heed(self.bench.release(name))
            self.seen["release"] += known
            if known:
                self._room()
            return
        lives = self.model.named(name)
        life = self.chance.choice(lives) if lives else None
        num_tokens, tokens = None, None
        if life is not None and self.chance.random() < 0.6:
            reach = life.num_tokens or max(life.rows, default=0) + 2
            num_tokens = max(1, reach + self.chance.choice([0, 0, 0, -1, 1]))
            if self.chance.random() < 0.6:
                tokens = [life.rows.get(p, ((), 7, 0, 0))[1] for p in range(num_tokens - 1)]
                if tokens and self.chance.random() < 0.2:
                    tokens[self.chance.randrange(len(tokens))] ^= 1
        partial = self.chance.random() < 0.4
        expected, of = self._expected(name, num_tokens, tokens, partial)
        answer = self.bench.pull(name, num_tokens, tokens, partial=partial)
        self.seen[expected] += 1
        assert answer.code == ("" if expected == "routes" else expected)
        if expected == "not_ready" and of is not None and num_tokens is not None and of.flush is None:
            of.flush, of.flush_tokens = num_tokens, None if tokens is None else tuple(tokens)
        if expected == "incomplete":
            assert of is not None
            assert answer.problem is not None
            n = of.num_tokens if num_tokens is None else num_tokens
            assert list(answer.problem.missing) == of.missing(n - 1)
        if expected == "routes":
            assert of is not None
            self._check_array(answer, of, num_tokens)
        self.heed(answer.effects)

    def _expected(
        self, name: str, num_tokens: int | None, tokens: list[int] | None, partial: bool
    ) -> tuple[str, ModelLife | None]:
        """The code of the answer a pull that does not wait must get, or "routes", and the life it is about."""
        lives = self.model.named(name)
        if not lives:
            return ("released" if name in self.model.released else "unknown"), None
        fit = [x for x in lives if x.state not in ("aborted", *DEAD)] or lives
        if len(fit) > 1 and tokens is not None:
            chosen = [x for x in fit if x.digest_matches(tokens)]
            if not chosen and all(x.state == "complete" for x in fit):
                return "wrong_tokens", None
            fit = chosen or fit
        if len(fit) > 1:
            return ("lost" if all(x.state == "lost" for x in fit) else "ambiguous"), None
        (life,) = fit
        if life.state in DEAD:
            return life.state, life
        others = tokens is not None and life.others == tuple(tokens)
        if life.state == "open":
            return "wrong_tokens" if others else "not_ready", life
        if life.state == "aborted" and not partial:
            return "aborted", life
        assert life.num_tokens is not None
        asked = life.num_tokens if num_tokens is None else num_tokens
        if life.state == "incomplete" and not life.ended and asked < life.num_tokens:
            return "wrong_tokens" if others else "not_ready", life
        if asked > life.num_tokens and life.state != "aborted":
            return "length_mismatch", life
        rows = min(asked, life.num_tokens) - 1
        whole = life.prefix(rows) == rows
        if not whole and not partial:
            return "incomplete", life
        if tokens is not None and whole and asked <= life.num_tokens and not life.digest_matches(tokens):
            return "wrong_tokens", life
        return "routes", life

    def _check_array(self, answer: Any, life: ModelLife, num_tokens: int | None) -> None:
        assert life.num_tokens is not None
        rows = min(num_tokens or life.num_tokens, life.num_tokens) - 1
        routes = answer.routes
        assert np.array_equal(answer.array, life.array(0, rows, life.engine.geometry))
        assert answer.array.dtype == np.int16
        assert routes.num_tokens == rows + 1
        assert routes.shape == answer.array.shape
        assert list(routes.missing) == life.missing(rows)
        assert list(routes.provenance) == life.spans(0, rows, 2)
        assert list(routes.weight_spans) == life.spans(0, rows, 3)
        assert routes.status == life.state
        assert routes.trimmed == (rows + 1 < life.num_tokens)
        assert routes.geometry == life.engine.geometry

    def time(self) -> None:
        seconds = self.chance.choice([0.1, 1.0, 6.0])
        self.bench.now += seconds
        now = self.model.now = self.bench.now
        stalled = [e for e in self.engines if e.model.stalled]
        since = [self.stalled_at[id(e)] for e in stalled]
        if stalled and (self.shedding or now - min(since) >= GRACE) and (life := self.model.youngest()):
            life.die("lost")
            self.shedding = True
            self.seen["shed"] += 1
            self._resume()
        old = self._idle(now)
        old += [x for x in self.model.lives if x.state != "open" and now - x.settled_at >= TTL]
        for life in old:
            self.model.forget(life)
            self.seen["expired"] += 1
        if old:
            self._room()
        self.heed(self.bench.tick())

    def _idle(self, now: float) -> list[ModelLife]:
        """Open lives whose end, as the core has it, did not move between two looks a time to live apart."""
        found = []
        for life in self.model.lives:
            key = id(life)
            _, mark, due = self.watched.setdefault(key, (life, -1, now + TTL))
            if due > now:
                continue
            emitter = next(e.emitter for e in self.engines if e.model is life.engine)
            core = self.bench.core
            end = int(core.lives.end[core.streams.sessions[emitter.incarnation].lives[life.life].slot])
            if life.state == "open" and end == mark:
                found.append(life)
            self.watched[key] = (life, end, now + TTL)
        return found

    def _room(self) -> None:
        self.shedding = False
        self._resume()

    def _resume(self) -> None:
        for engine in self.engines:
            engine.model.stalled = False
            self.stalled_at.pop(id(engine), None)

    # ------------------------------------------------------------------ the verdict

    def check(self) -> None:
        """Every life of the model is in the core, in the same state, with exactly the same rows."""
        core = self.bench.core
        assert len(core.lives) == len(self.model.lives)
        for engine in self.engines:
            session = core.streams.sessions[engine.emitter.incarnation]
            assert session.applied == engine.model.applied
            assert (session.stalled_at is not None) == engine.model.stalled
            for name, life in engine.model.lives.items():
                found = session.lives[name]
                assert (str(found.state), found.name, found.num_tokens) == (life.state, life.name, life.num_tokens)
                assert held(core, found) == {p: life.rows[p] for p in sorted(life.rows)}, f"life {name}"
        assert core.arena.free_pages == self.model.free
