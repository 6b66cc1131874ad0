"""The trainers' side of the core: which life a name means, and when its answer is ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from collector.core.assembly import Assembly
from collector.core.config import CoreConfig
from collector.core.events import Effect, ServeRoutes, ToEngine, ToTrainer
from collector.core.life import Life, State
from collector.core.lives import LifeTable
from collector.core.serving import BadPull, digest_of, header_for
from protocol import codes, limits
from protocol.messages import Flush, Problem, Pull, Range

_ASK_AGAIN_S = 2.0
"""A Flush that a full pipe dropped is asked again after this; the second answer to one question changes nothing."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A pull without an answer yet. Times are the clock's, in seconds."""

    peer: bytes
    pull: Pull
    deadline: float


@dataclass(slots=True, frozen=True)
class _Not:
    """Why there is no array. `settled`: waiting longer cannot help."""

    code: str
    message: str
    settled: bool
    missing: tuple[Range, ...] = ()


_LEAVING = _Not(codes.SHUTTING_DOWN, "the collector is shutting down: ask the next one that serves here", True)


class Queries:
    """Pulls. `released` tells whether a name was released before."""

    def __init__(
        self,
        config: CoreConfig,
        lives: LifeTable,
        assembly: Assembly,
        released: Callable[[str], bool],
        emit: Callable[[Effect], None],
    ) -> None:
        self._config = config
        self._lives = lives
        self._assembly = assembly
        self._released = released
        self._emit = emit
        self._waiting: dict[str, list[Waiting]] = {}
        self._per_peer: Counter[bytes] = Counter()
        self.served = 0
        self.problems: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def pull(self, peer: bytes, pull: Pull, now: float) -> None:
        """Answer now, or keep the pull until it can be answered or its deadline."""
        refusal = _refusal(pull)
        if refusal is None and self._per_peer[peer] >= limits.MAX_WAITING_PULLS:
            refusal = _Not(codes.TOO_MANY, f"{limits.MAX_WAITING_PULLS} pulls of this client wait already", True)
        if refusal is not None:
            self._answer_problem(peer, pull, refusal)
            return
        waiting = Waiting(peer, pull, now + min(pull.timeout_ms, limits.MAX_PULL_TIMEOUT_MS) / 1e3)
        if not self._try(waiting, now):
            self._waiting.setdefault(pull.request_id, []).append(waiting)
            self._per_peer[peer] += 1

    def changed(self, life: Life, now: float) -> None:
        """A life moved: its waiting pulls may have an answer."""
        self._retry(life.name, now)

    def tick(self, now: float) -> None:
        """Answer what is past its deadline, or has waited long enough for repairs."""
        for name in list(self._waiting):
            self._retry(name, now)

    def leave(self) -> None:
        """Answer everything that waits: this collector will not."""
        for waiting in self._waiting.values():
            for one in waiting:
                self._answer_problem(one.peer, one.pull, _LEAVING)
        self._waiting.clear()
        self._per_peer.clear()

    def _retry(self, name: str, now: float) -> None:
        waiting = self._waiting.get(name)
        if not waiting:
            return
        left = []
        for one in waiting:
            if self._try(one, now):
                self._per_peer[one.peer] -= 1
                if not self._per_peer[one.peer]:
                    del self._per_peer[one.peer]
            else:
                left.append(one)
        if left:
            self._waiting[name] = left
        else:
            del self._waiting[name]

    def _try(self, waiting: Waiting, now: float) -> bool:
        pull = waiting.pull
        found = self._resolve(pull, now)
        if isinstance(found, _Not):
            if not found.settled and now < waiting.deadline:
                return False
            self._answer_problem(waiting.peer, pull, found)
            return True
        life, num_tokens = found
        try:
            header = header_for(self._assembly, life, pull, num_tokens)
        except BadPull as error:
            self._answer_problem(waiting.peer, pull, _Not(error.code, str(error), True))
            return True
        except Exception as error:
            # A bug, and one trainer's: the others, and the engines, are served on.
            self._answer_problem(waiting.peer, pull, _Not(codes.INTERNAL, f"a bug of the collector: {error!r}", True))
            return True
        self.served += 1
        self._emit(ServeRoutes(waiting.peer, pull, header, life))
        return True

    def _resolve(self, pull: Pull, now: float) -> tuple[Life, int] | _Not:
        lives = self._lives.named(pull.request_id)
        if not lives:
            if self._released(pull.request_id):
                return _Not(codes.RELEASED, "released by a trainer, or kept past its time to live", True)
            return _Not(codes.UNKNOWN, "no engine has opened it: check the id and the engine's capture", False)
        fit = [x for x in lives if x.state not in (State.ABORTED, State.LOST, State.FAILED)] or lives
        if len(fit) > 1 and pull.token_digest is not None and pull.num_tokens is not None:
            chosen = [x for x in fit if self._tokens_match(x, pull)]
            if not chosen and all(x.state is State.COMPLETE for x in fit):
                return _Not(codes.WRONG_TOKENS, f"none of the {len(fit)} runs of this id has the tokens sent", True)
            fit = chosen or fit
        if len(fit) > 1 and all(x.state is State.LOST for x in fit):
            fit = fit[-1:]
        if len(fit) > 1:
            names = ", ".join(f"{x.session.engine_id}/{x.req_id} ({x.state})" for x in fit[:4])
            return _Not(codes.AMBIGUOUS, f"{len(fit)} runs carry this id: {names}; send token_ids to choose", True)
        return self._answerable(fit[0], pull, now)

    def _answerable(self, life: Life, pull: Pull, now: float) -> tuple[Life, int] | _Not:
        if life.state is State.LOST:
            return _Not(codes.LOST, life.reason, True)
        if life.state is State.FAILED:
            return _Not(codes.FAILED, life.reason, True)
        if life.state is State.OPEN or _needs_own_barrier(life, pull):
            if pull.token_digest is not None and life.not_its_tokens == (pull.num_tokens, pull.token_digest):
                return _Not(codes.WRONG_TOKENS, "this run has other tokens than the ones sent", True)
            self._ask_flush(life, pull, now)
            return _Not(codes.NOT_READY, f"still open, {len(life.pages)} pages held, no end was said", False)
        assert life.num_tokens is not None
        if life.state is State.ABORTED and not pull.partial:
            return _Not(codes.ABORTED, f"aborted after {life.num_tokens - 1} rows: pull with partial=True", True)
        asked = life.num_tokens if pull.num_tokens is None else pull.num_tokens
        num_tokens = min(asked, life.num_tokens)
        if asked > num_tokens and life.state is not State.ABORTED:
            text = f"{asked} tokens asked, the engine finished at {num_tokens}"
            return _Not(codes.LENGTH_MISMATCH, text, True)
        inside: tuple[Range, ...] = ()
        if life.state is State.INCOMPLETE:
            inside = tuple((a, min(b, num_tokens - 1)) for a, b in life.missing if a < num_tokens - 1)
            if inside and not pull.partial:
                patient = now < life.settled_at + self._config.incomplete_wait_s
                return _Not(codes.INCOMPLETE, _ranges_text(inside), not patient, inside)
        # Of a shorter prefix, or with rows missing, there is no such digest: the answer's own tells the client.
        checkable = pull.token_digest is not None and asked == num_tokens and not inside
        if checkable and not self._tokens_match(life, pull):
            return _Not(codes.WRONG_TOKENS, "the rows belong to other tokens than the ones sent", True)
        return life, num_tokens

    def _ask_flush(self, life: Life, pull: Pull, now: float) -> None:
        """A length is not an end: ask the emitter to say when everything launched has been shipped."""
        if pull.num_tokens is None or life.session.peer is None:
            return
        if life.flush_asked is None:
            life.flush_asked, life.flush_digest = pull.num_tokens, pull.token_digest
            life.note(now, f"a trainer says {pull.num_tokens} tokens: flush asked")
        elif now < life.flush_asked_at + _ASK_AGAIN_S:
            return
        life.flush_asked_at = now
        self._emit(ToEngine(life.session.peer, Flush(life.req_id, life.flush_asked)))

    def _tokens_match(self, life: Life, pull: Pull) -> bool:
        n = pull.num_tokens if pull.num_tokens is not None else life.num_tokens
        if n is None or n - 1 > int(self._lives.end[life.slot]):
            return False
        return digest_of(self._assembly, life, n) == pull.token_digest

    def _answer_problem(self, peer: bytes, pull: Pull, why: _Not) -> None:
        self.problems[why.code] += 1
        request_id = pull.request_id[: limits.MAX_ID_CHARS]
        text = f"{request_id}: {why.message}"
        self._emit(ToTrainer(peer, Problem(pull.nonce, why.code, text, request_id, why.missing[: limits.MAX_SPANS])))


def _refusal(pull: Pull) -> _Not | None:
    if not 0 < len(pull.request_id) <= limits.MAX_ID_CHARS:
        return _Not(codes.BAD_REQUEST, f"an id has 1 to {limits.MAX_ID_CHARS} characters", True)
    if pull.num_tokens is not None and not 1 <= pull.num_tokens <= limits.MAX_TOKENS:
        return _Not(codes.BAD_REQUEST, f"num_tokens must be in [1, {limits.MAX_TOKENS}], got {pull.num_tokens}", True)
    if pull.timeout_ms < 0:
        return _Not(codes.BAD_REQUEST, "timeout_ms must not be negative", True)
    return None


def _needs_own_barrier(life: Life, pull: Pull) -> bool:
    """The barrier behind `incomplete` was of another trainer's length, which the engine may not have reached then: what
    was held there may have been drafts."""
    if life.state is not State.INCOMPLETE or life.ended or pull.num_tokens is None:
        return False
    return life.num_tokens is not None and pull.num_tokens < life.num_tokens


def _ranges_text(missing: tuple[Range, ...]) -> str:
    shown = ", ".join(f"[{a}, {b})" for a, b in missing[:8])
    return f"{sum(b - a for a, b in missing)} rows missing: {shown}{' …' if len(missing) > 8 else ''}"
