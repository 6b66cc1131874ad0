"""Pulls every request that an engine ended, compares it with the witness, releases it. The collector comes and goes."""

from __future__ import annotations

import queue
import threading

import numpy as np

from collector.client import RouteClient
from collector.client.errors import CollectorUnreachable, NotReady, UnknownRequest
from tests.chaos.witness import Witness
from tests.harness.patches import SMALL

_PATIENCE = 60
"""Tries of two seconds each."""


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
        with RouteClient(self._address, timeout=1.0) as client:
            while (request_id := self.todo.get()) is not None:
                try:
                    self._take(client, request_id)
                except Exception as error:
                    self.wrong[request_id] = repr(error)

    def _take(self, client: RouteClient, request_id: str) -> None:
        witness = Witness(self._seed, request_id)
        for _ in range(_PATIENCE):
            try:
                routes = client.pull(request_id, token_ids=witness.tokens.tolist())
                break
            except (CollectorUnreachable, UnknownRequest, NotReady):
                # It is away, or what it had not acknowledged is on its way again.
                self.unanswered += 1
        else:
            self.wrong[request_id] = "never served"
            return
        if routes.status != "complete" or not np.array_equal(routes.array[:, list(SMALL.moe_layer_ids)], witness.rows):
            self.wrong[request_id] = f"{routes.status}, other rows"
            return
        self.served += 1
        try:
            client.release(request_id)
        except CollectorUnreachable:
            self.unanswered += 1
