"""Pulls every request that an engine ended, compares it with the witness, releases it. The collector comes and goes."""

from __future__ import annotations

import queue
import threading

import numpy as np

from collector.client import RouteClient
from collector.client.errors import CollectorUnreachable, NotReady, UnknownRequest
from tests.chaos.witness import Witness
from tests.harness.patches import SMALL

_PATIENCE = 20
_AT_ONCE = 64


class Trainer:
    """One thread. `wrong` holds what was not as it should be, by request."""

    def __init__(self, trainers: str, seed: int) -> None:
        self._address, self._seed = trainers, seed
        self.todo: queue.Queue[str | None] = queue.Queue()
        self.served = self.unanswered = 0
        self.wrong: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Take what is left, then end."""
        self.todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        with RouteClient(self._address, timeout=5.0) as client:
            while (batch := self._batch()) is not None:
                try:
                    self._take(client, batch)
                except Exception as error:
                    self.wrong |= dict.fromkeys(batch, repr(error))

    def _batch(self) -> list[str] | None:
        """What has ended by now, None at the end."""
        found = [self.todo.get()]
        while not self.todo.empty() and len(found) < _AT_ONCE:
            found.append(self.todo.get())
        if None in found:
            self.todo.put(None)
        batch = [name for name in found if name is not None]
        return batch or None

    def _take(self, client: RouteClient, batch: list[str]) -> None:
        witnesses = [Witness(self._seed, name) for name in batch]
        for _ in range(_PATIENCE):
            try:
                answers = client.pull_many(batch, token_ids=[witness.tokens for witness in witnesses])
                break
            except (CollectorUnreachable, UnknownRequest, NotReady):
                # It is away, or what it had not acknowledged is on its way again.
                self.unanswered += 1
        else:
            self.wrong |= dict.fromkeys(batch, "never served")
            return
        for name, routes, witness in zip(batch, answers, witnesses, strict=True):
            same = np.array_equal(routes.array[:, list(SMALL.moe_layer_ids)], witness.rows)
            if routes.status != "complete" or not same:
                self.wrong[name] = f"{routes.status}, other rows"
            else:
                self.served += 1
        try:
            client.release(batch)
        except CollectorUnreachable:
            self.unanswered += 1
