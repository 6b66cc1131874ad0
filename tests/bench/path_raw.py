"""What the path bench is measured against: the same frames over bare pyzmq, one way, nothing done with them."""

from __future__ import annotations

import json
import sys
import time

import zmq

from engine_side.shipping.pack import Packer
from tests.bench.assembly import GEOMETRY
from tests.bench.path_steps import Steps


def main() -> None:
    """`receive ENDPOINT N SEED` prints {"rate": messages a second}; `send ENDPOINT N SEED` sends them."""
    role, endpoint, count, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    context = zmq.Context()
    if role == "receive":
        socket = context.socket(zmq.ROUTER)
        socket.bind(endpoint)
        socket.recv_multipart(copy=False)
        started = time.perf_counter()
        for _ in range(count - 1):
            socket.recv_multipart(copy=False)
        print(json.dumps({"rate": (count - 1) / (time.perf_counter() - started)}))
    else:
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        frames = Packer(GEOMETRY).step(Steps(seed).landed(1)).frames(1)
        for _ in range(count):
            socket.send_multipart(frames, copy=False)
    socket.close()
    context.term()


if __name__ == "__main__":
    main()
