"""A cpu_worker by somebody who has only read docs/protocol.md.

It uses the standard library, pyzmq, msgpack and numpy, and nothing of the project. It computes
gated SiLU experts (as Qwen3-MoE has them) of a float32 store, and leaves when told to.

    python tests/outsider_worker.py RUN_DIR
"""

from __future__ import annotations

import array
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
import zlib
from typing import Any

import msgpack
import numpy as np
import zmq

PROTOCOL_VERSION = 3


def receive_grant(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The one frame of the life line, and the descriptors that came with it."""
    data, descriptors = b"", array.array("i")
    while len(data) < 4 or len(data) < 4 + struct.unpack_from("<I", data)[0]:
        chunk, ancillary, _, _ = line.recvmsg(65536, socket.CMSG_SPACE(16 * descriptors.itemsize))
        if not chunk:
            sys.exit("outsider: the orchestrator went away while loading")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) // 4 * 4])
        data += chunk
    return msgpack.unpackb(data[4:]), descriptors.tolist()


class Store:
    """The expert store, read as its header says."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        magic, version, checksum, length = struct.unpack_from("<8sIIQ", self.memory)
        text = self.memory[24 : 24 + length]
        if (magic, version, zlib.crc32(text)) != (b"HRSTORE\0", 2, checksum):
            sys.exit("outsider: this is no expert store of version 2")
        self.layout = json.loads(text)
        form = self.layout["form"]
        if self.layout["dtype"] != "float32" or (form["gate"], form["activation"]) != (
            "act_mul",
            "silu",
        ):
            sys.exit("outsider: only float32 experts with a SiLU gate are known here")
        if form["is_transposed"] or form["is_interleaved"] or form["has_bias"]:
            sys.exit("outsider: only plain weights are known here")

    def tensors(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        index = sum(self.layout["num_experts"][:layer]) + expert
        block = self.layout["blocks_offset_bytes"] + index * self.layout["block_bytes"]
        return {
            tensor["name"]: np.ndarray(
                tensor["shape"], np.float32, self.memory, block + tensor["offset_bytes"]
            )
            for tensor in self.layout["tensors"]
        }


def compute(tensors: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """[n, hidden] -> [n, hidden]."""
    gate, up = np.split(x @ tensors["gate_up"].T, 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up) @ tensors["down"].T


class Activations:
    """The activation segment, as the grant's fields say."""

    def __init__(self, fd: int, segment: dict[str, Any]) -> None:
        memory = mmap.mmap(fd, segment["num_bytes"])
        self.header, self.hidden, self.choices, self.rows = (
            np.ndarray(field["shape"], field["dtype"], memory, field["offset_bytes"])
            for field in (
                segment["fields"][name] for name in ("header", "hidden", "choices", "rows")
            )
        )

    def execute(self, store: Store, command: dict[str, Any]) -> bool:
        """False when the command is stale."""
        step, layer, num_rows = (int(value) for value in self.header[:3])
        if (step, layer) != (command["step"], command["layer"]):
            return False
        for expert in command["experts"]:
            row_ids, choice_ids = np.nonzero(self.choices[:num_rows] == expert)
            if len(row_ids):
                tensors = store.tensors(layer, expert)
                self.rows[row_ids, choice_ids] = compute(tensors, self.hidden[row_ids])
        return True


def find_orchestrator(path: str, patience_s: float = 30.0) -> socket.socket:
    """The life line of an orchestrator that may not be there yet."""
    deadline = time.monotonic() + patience_s
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(path)
            return line
        except OSError:
            line.close()
            if time.monotonic() > deadline:
                sys.exit(f"outsider: no orchestrator at {path}")
            time.sleep(0.1)


def main(run_dir: str) -> None:
    line = find_orchestrator(f"{run_dir}/lifeline.sock")
    grant, descriptors = receive_grant(line)
    segments = {
        segment["name"]: (fd, segment)
        for fd, segment in zip(descriptors, grant["segments"], strict=True)
    }
    weights_fd, weights = segments["weights"]
    store = Store(weights_fd, weights["num_bytes"])
    activations = Activations(*segments["activations"])

    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 200)
    dealer.connect(f"ipc://{run_dir}/control.sock")

    def send(kind: str, **fields: Any) -> None:
        dealer.send(msgpack.packb({"type": kind, **fields}))

    hello = {"role": "cpu_worker", "pid": os.getpid(), "token": grant["token"]}
    send("Hello", protocol_version=PROTOCOL_VERSION, **hello)
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(line, zmq.POLLIN)
    epoch = 0
    while True:
        ready = dict(poller.poll())
        if dealer not in ready:  # the life line has ended
            break
        command = msgpack.unpackb(dealer.recv())
        kind = command["type"]
        if kind == "Refused":
            sys.exit(f"outsider: {command['sentence']}")
        if kind == "Welcome":
            epoch = command["epoch"]
            send("Ready", epoch=epoch, bytes_per_s=1e9)
        elif kind == "Shutdown":
            break
        elif kind == "Execute" and command["epoch"] == epoch:
            started_ns = time.monotonic_ns()
            if activations.execute(store, command):
                names = ("epoch", "step", "layer", "experts")
                send(
                    "Executed",
                    **{name: command[name] for name in names},
                    started_ns=started_ns,
                    ended_ns=time.monotonic_ns(),
                    num_bytes=len(command["experts"]) * store.layout["block_bytes"],
                )
    dealer.close()
    context.term()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    main(sys.argv[1])
