"""When a life is over, and as what (rules 4, 5 and 6 of assembly)."""

from __future__ import annotations

from collector.core.assembly import Assembly
from collector.core.journal import Journal
from collector.core.life import Life, State
from collector.core.lives import LifeTable
from collector.core.serving import digest_of
from protocol.limits import MAX_DETAIL_CHARS, MAX_TOKENS
from protocol.messages import FinishReason


class Settlement:
    """Moves lives out of `open`. Lengths count tokens; a life of n tokens has n-1 rows."""

    def __init__(self, assembly: Assembly, lives: LifeTable, journal: Journal) -> None:
        self._assembly = assembly
        self._lives = lives
        self._journal = journal

    def finished(self, life: Life, num_tokens: int | None, reason: FinishReason, detail: str, now: float) -> None:
        """The emitter's own finish, behind its last row: a length and an end."""
        detail = detail[:MAX_DETAIL_CHARS]
        life.note(now, f"finished: {reason}, {num_tokens} tokens{': ' + detail if detail else ''}")
        if not life.takes_rows or (life.ended and reason != "failed"):
            self._second_finish(life, num_tokens, now)
            return
        life.ended, life.flush_asked = True, None
        if reason == "failed":
            self._close(life, State.FAILED, detail or "the engine failed it", now)
        elif num_tokens is None and reason != "aborted":
            self._close(life, State.FAILED, "finished without a length", now)
        elif num_tokens is not None and not 1 <= num_tokens <= MAX_TOKENS:
            self._close(life, State.FAILED, f"finished with {num_tokens} tokens", now)
        elif reason == "aborted":
            self._abort(life, num_tokens, now)
        else:
            assert num_tokens is not None
            self._count(life, num_tokens, now)

    def flushed(self, life: Life, num_tokens: int, now: float) -> None:
        """The barrier a trainer's length asked for: everything launched before it has been applied."""
        if life.takes_rows and not life.ended and life.flush_asked == num_tokens:
            life.flush_asked = None
            life.note(now, f"flushed at {num_tokens} tokens")
            life.length_digest = life.flush_digest
            if self._is_of_others(life, num_tokens):
                life.note(now, "the trainer's tokens are not these: nothing settles")
            else:
                self._count(life, num_tokens, now)

    def refilled(self, life: Life, now: float) -> None:
        """Rows were filled into an incomplete life."""
        if life.state is not State.INCOMPLETE or life.num_tokens is None:
            return
        if not life.ended and self._is_of_others(life, life.num_tokens):
            life.state, life.num_tokens, life.missing = State.OPEN, None, ()
            self._journal.changed(life)
            life.session.forget_batch()
            life.note(now, "whole, and not of the tokens whose length it was: open again")
            return
        self._count(life, life.num_tokens, now)

    def lost(self, life: Life, reason: str, now: float) -> None:
        """Nobody is left to fill it. Its pages are free at once: a lost life is never served."""
        if life.takes_rows:
            self._close(life, State.LOST, reason, now)

    def corrupt(self, life: Life, now: float) -> None:
        """Rows of it are not what was written: nothing of it is served any more, whatever it was before."""
        self._close(life, State.FAILED, "its rows in memory are not what was written there", now)

    def _count(self, life: Life, num_tokens: int, now: float) -> None:
        life.num_tokens = num_tokens
        life.missing = self._assembly.missing(life, num_tokens - 1)
        self._settle(life, State.INCOMPLETE if life.missing else State.COMPLETE, now)

    def _is_of_others(self, life: Life, num_tokens: int) -> bool:
        """Whether the length came with tokens that are not this life's: under an id that was used again, a trainer may
        ask for one run and find another, whose length it does not know."""
        digest = life.length_digest
        if digest is None or self._assembly.missing(life, num_tokens - 1):
            return False
        if digest_of(self._assembly, life, num_tokens) == digest:
            return False
        life.not_its_tokens = (num_tokens, digest)
        return True

    def _abort(self, life: Life, num_tokens: int | None, now: float) -> None:
        # Behind the first row of the last forward segment there may be drafts that nobody accepted.
        rows = int(self._lives.last_forward[life.slot]) + 1 if num_tokens is None else num_tokens - 1
        rows = min(rows, int(self._lives.end[life.slot]))
        missing = self._assembly.missing(life, rows)
        life.num_tokens = (missing[0][0] if missing else rows) + 1
        life.missing = ()
        self._settle(life, State.ABORTED, now)

    def _second_finish(self, life: Life, num_tokens: int | None, now: float) -> None:
        if life.num_tokens is None or num_tokens is None or num_tokens == life.num_tokens:
            return
        if 1 <= num_tokens < life.num_tokens:
            life.num_tokens = num_tokens
            self._journal.changed(life)
            life.note(now, f"a second finish trims it to {num_tokens} tokens")
            self.refilled(life, now)
        else:
            life.note(now, f"conflict: a second finish says {num_tokens} tokens, {life.num_tokens} stand")

    def _close(self, life: Life, state: State, reason: str, now: float) -> None:
        life.reason = reason
        self._settle(life, state, now)
        self._lives.free_rows(life)

    def _settle(self, life: Life, state: State, now: float) -> None:
        life.state, life.settled_at = state, now
        self._journal.changed(life)
        life.note(now, str(state) + (f": {life.reason}" if life.reason else ""))
        life.session.forget_batch()
