"""The other end of layer_overhead's bare round trip: returns each message until an empty one."""

from __future__ import annotations

import sys

import zmq


def main(endpoint: str) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send(b"ready")
    while message := socket.recv():
        socket.send(message)
    socket.close(0)
    context.term()


if __name__ == "__main__":
    main(sys.argv[1])
