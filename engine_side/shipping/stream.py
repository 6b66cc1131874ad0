"""Everything a shipper decides: what goes on the wire, in which order, and what an answer changes. Pure; the thread
around it owns the socket and the clock."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_side.capture.records import COMMIT_MASK, UNPROVEN
from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.live import LiveLives
from engine_side.shipping.losses import Losses, RepairAsk
from engine_side.shipping.pack import Packed, Packer, check
from engine_side.shipping.window import Entry, Window
from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import (
    Ack,
    CollectorToEngine,
    FinishReason,
    Flush,
    Flushed,
    Heartbeat,
    Hello,
    HelloFirst,
    Kind,
    RequestFinished,
    Welcome,
)

log = logging.getLogger("r3.shipper")

HEARTBEAT_S = 1.0
_REPAIR_BYTES: Final = 8 << 20


@dataclass(slots=True, frozen=True)
class Finish:
    """The end of a life, behind its rows."""

    life: str
    num_tokens: int | None
    reason: FinishReason
    detail: str = ""


@dataclass(slots=True, frozen=True)
class Lost:
    """A step whose rows will not come."""

    plan: StepPlan


@dataclass(slots=True, frozen=True)
class Barrier:
    """A `Flush` that was read: everything launched before it stands before it in the queue."""

    life: str
    num_tokens: int


Item: TypeAlias = LandingStep | Finish | Lost | Barrier


@dataclass(slots=True)
class ShipperStats:
    """Counters since start. bytes: row memory shipped. rows_lost: declared lost, rows_repaired: of those, shipped after
    all. acked_seq: -1 before the first acknowledgement."""

    patches: int = 0
    rows: int = 0
    bytes: int = 0
    rows_lost: int = 0
    rows_repaired: int = 0
    errors: int = 0
    acked_seq: int = -1
    next_seq: int = 0
    connected: bool = False
    held_bytes: int = 0


class Stream:
    """One incarnation's messages. The engine thread appends to `queue` and does nothing else; one other thread calls
    the methods. Times are seconds of any monotonic clock."""

    def __init__(self, geometry: Geometry, engine_id: str, incarnation: str, window_cap_bytes: int) -> None:
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.queue: deque[Item] = deque()
        self.welcomed = False
        self.dead = False
        self._geometry = geometry.validate()
        self._packer = Packer(geometry)
        self._window = Window(window_cap_bytes)
        self._row_bytes = self._packer.row_bytes
        self._losses = Losses()
        self.asks: deque[RepairAsk] = deque()
        """What the engine's thread should read back: it takes an ask and queues the landing, or the plan as `Lost`."""
        self.live = LiveLives()
        self._stats = ShipperStats()
        self._state_id = ""
        self._hello_at = 0.0
        self._beat_at = 0.0

    @property
    def unacknowledged(self) -> int:
        """Messages that the collector has not acknowledged."""
        return len(self._window)

    @property
    def crowded(self) -> bool:
        """Whether the window is so full that requests lose rows."""
        return self._window.share < 1.0

    @property
    def drained(self) -> bool:
        """Whether everything handed over was shipped and acknowledged."""
        return not self.dead and not self.queue and len(self._window) == 0

    def stats(self) -> ShipperStats:
        """A copy of the counters."""
        window = self._window
        return replace(self._stats, connected=self.welcomed, next_seq=window.next_seq, held_bytes=window.held_bytes)

    def failed(self) -> None:
        """Count an error that the thread met."""
        self._stats.errors += 1
        self.dead = True

    # ------------------------------------------------------------------ from the engine

    def take(self) -> bool:
        """Number the oldest item of the queue and put it into the window; False when the queue is empty. Blocks until a
        step has landed, and gives its ring slot back."""
        if not self.queue:
            return False
        item = self.queue.popleft()
        window = self._window
        if isinstance(item, LandingStep):
            try:
                self._take_step(item)
            finally:
                item.free()
        elif isinstance(item, Lost):
            self._lost(item.plan)
        elif isinstance(item, Barrier):
            # The trainer's length is all the end such a life ever gets.
            self.live.finished(item.life, window.next_seq)
            window.add((codec.encode(Flushed(window.next_seq, item.life, item.num_tokens)),), 0)
        else:
            self._finish(item)
        return True

    def _take_step(self, step: LandingStep) -> None:
        try:
            step.wait()
            if step.proof is not None:
                step = self._proven(step, step.proof)
            failed = check(step)
            if self._losses:
                self._losses.cut(step.plan.req_ids, step.starts, step.plan.kinds)
            counts = self._room_for(step)
            kept, dropped = step, None
            if counts is not None:
                kept, dropped = step.first_rows(counts), step.first_rows(np.diff(step.plan.offsets) - counts)
            packed = self._packer.step(kept)
        except Exception:
            self._stats.errors += 1
            log.exception("step %d could not be read back: its rows are lost", step.plan.step)
            self._lost(step.plan)
            return
        if dropped is not None and dropped.plan.req_ids:
            self._drop(dropped)
        if kept.plan.req_ids:
            self._ship(kept.plan, packed)
            if kept.proof is not None:
                self._stats.rows_repaired += int((kept.status == 0).sum())
        for life, why in failed:
            self._stats.errors += 1
            log.error("life %s: %s", life, why)
            self._finish(Finish(life, None, "failed", why))

    def _ship(self, plan: StepPlan, packed: Packed) -> None:
        self._note_opens(plan)
        self._window.add(packed.frames(self._window.next_seq), packed.nbytes)
        self._stats.patches += 1
        self._stats.rows += len(packed.rows)
        self._stats.bytes += packed.nbytes

    def _room_for(self, step: LandingStep) -> NDArray[np.int64] | None:
        """How many rows of each segment the window still takes: all or none of a life's, the oldest lives first. None
        stands for all of them."""
        window, plan = self._window, step.plan
        if window.share == 1.0 and len(step.token_ids) * self._row_bytes <= window.room:
            return None
        lengths = np.diff(plan.offsets).astype(np.int64)
        _, life = np.unique(self.live.ages(plan.req_ids), return_inverse=True)
        nbytes = np.cumsum(np.bincount(life, lengths)) * self._row_bytes
        few = max(1, int(window.share * len(nbytes)))
        fits = (np.arange(len(nbytes)) < few) & (nbytes <= window.room)
        return np.where(fits[life], lengths, 0)

    def _drop(self, step: LandingStep) -> None:
        """No room for these rows of a landed step: lost, unless the slot store gives them back later."""
        if step.proof is None:
            self._declare_lost(step.plan, step.starts)
        self._losses.add(step)

    # ------------------------------------------------------------------ repairs

    def wish(self) -> None:
        """Ask for lost rows to be read back, once there is plenty of room for them."""
        if self._losses.rows and self.welcomed and self._window.share == 1.0:
            # So few that with the rows that come meanwhile the window stays out of need.
            ask = self._losses.ask(max(1, min(_REPAIR_BYTES, self._window.room // 4) // self._row_bytes))
            if ask is not None:
                self.asks.append(ask)

    def _proven(self, step: LandingStep, proof: NDArray[np.int32]) -> LandingStep:
        """Of rows that were read back, those that are still wanted. A row is what was lost only if the very commit
        that wrote it still stands in its slot."""
        assert step.stamps is not None
        wanted = self._losses.answered()
        status = np.where((step.stamps >> 8) & COMMIT_MASK == proof, step.status, UNPROVEN)
        step = replace(step, status=status.astype(np.uint8))
        # A `forward` takes back the rest of its life, so what is left of a segment is its beginning.
        return step.first_rows(np.add.reduceat(wanted, step.plan.offsets[:-1], dtype=np.int64))

    def _lost(self, plan: StepPlan) -> None:
        if len(plan.kinds) and plan.kinds[0] == Kind.REPAIR:
            # They were declared lost when they were dropped.
            self._losses.answered()
            return
        if self._losses:
            self._losses.cut(plan.req_ids, plan.starts, plan.kinds)
        self._declare_lost(plan)

    # ------------------------------------------------------------------ what takes a number

    def _finish(self, item: Finish) -> None:
        window = self._window
        self.live.finished(item.life, window.next_seq)
        done = RequestFinished(window.next_seq, item.life, item.num_tokens, item.reason, item.detail)
        window.add((codec.encode(done),), 0)

    def _declare_lost(self, plan: StepPlan, starts: NDArray[np.int32] | None = None) -> None:
        if not self._stats.rows_lost:
            log.warning("rows of step %d are lost; further losses are only counted", plan.step)
        self._stats.rows_lost += int(plan.offsets[-1])
        self._note_opens(plan)
        self._window.add((self._packer.lost(plan, self._window.next_seq, starts),), 0)

    def _note_opens(self, plan: StepPlan) -> None:
        for index, name in plan.opens:
            self.live.opened(plan.req_ids[index], name, self._window.next_seq)

    # ------------------------------------------------------------------ to the collector

    def due(self) -> Entry | None:
        """The next message that may be sent now; call `sent` once it is."""
        return self._window.due() if self.welcomed else None

    def sent(self, entry: Entry) -> None:
        """`entry`, as given by `due`, is on its way."""
        self._window.sent(entry)

    def keep_alive(self, now: float) -> Hello | Heartbeat | None:
        """What to say so that the connection stands: call `greeted` once a Hello is on its way."""
        if not self.welcomed:
            if now - self._hello_at <= HEARTBEAT_S:
                return None
            return Hello(self.engine_id, self.incarnation, self._geometry, self._window.first_seq, self._state_id)
        if now - self._beat_at <= HEARTBEAT_S:
            return None
        self._beat_at = now
        return Heartbeat(self._window.send_seq)

    def greeted(self, now: float) -> None:
        """A Hello was sent at `now`."""
        self._hello_at = now

    # ------------------------------------------------------------------ from the collector

    def hear(self, message: CollectorToEngine) -> None:
        """Take an answer. Raises RuntimeError when the collector asks for a message that is gone for good."""
        if isinstance(message, Ack):
            if message.state_id == self._state_id:
                self._window.allow = message.window_bytes
                self._acked(message.logged_seq)
        elif isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, HelloFirst):
            self.welcomed = False
        elif isinstance(message, Flush):
            # Behind everything launched until now: the engine thread appends to the same queue.
            self.queue.append(Barrier(message.req_id, message.num_tokens))
        else:
            self._stats.errors += 1
            log.error("the collector refused message %s: %s: %s", message.seq, message.code, message.message)

    def _welcome(self, message: Welcome) -> None:
        window = self._window
        if self._state_id not in ("", message.state_id) and message.next_seq == window.first_seq - 1:
            log.warning("the collector lost its state: live requests reopen as lost")
            lives = self.live.opened_before(window.first_seq)
            window.put_first((self._packer.reopened(lives, window.first_seq - 1),))
        self._state_id = message.state_id
        if not window.go_to(message.next_seq):
            raise RuntimeError(f"the collector asks for message {message.next_seq}, not in the window")
        window.allow = message.window_bytes
        self.welcomed = True

    def _acked(self, seq: int) -> None:
        self._stats.acked_seq = max(self._stats.acked_seq, seq)
        self._window.acked(seq)
        self.live.acked(seq)
