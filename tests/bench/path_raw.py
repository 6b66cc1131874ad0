"""The floor of the path bench: the same frames over bare pyzmq, one way, nothing done with them."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import zmq

from tests.bench.assembly import GEOMETRY

REQUESTS = 256


def main() -> None:
    """`receive ENDPOINT N` prints {"rate": messages a second}; `send ENDPOINT N` sends them."""
    role, endpoint, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    context = zmq.Context()
    if role == "receive":
        socket = context.socket(zmq.ROUTER)
        socket.bind(endpoint)
        socket.recv_multipart(copy=False)
        started = time.perf_counter()
        for _ in range(count - 1):
            socket.recv_multipart(copy=False)
        print(json.dumps({"rate": (count - 1) / (time.perf_counter() - started)}))
        socket.close()
    else:
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        rows = np.zeros(REQUESTS * GEOMETRY.row_nbytes, np.uint8).data
        tokens, header = np.zeros(REQUESTS * 4, np.uint8).data, bytes(2000)
        for _ in range(count):
            socket.send_multipart([header, rows, tokens], copy=False)
        socket.close()
    context.term()


if __name__ == "__main__":
    main()
