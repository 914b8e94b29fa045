"""Makes every process of a pipeline believe in the machine below FAKE_MACHINE_ROOT: its NUMA nodes
are looked up there, and asking for memory of one of them is granted and forgotten.

Python runs this at its start when the folder is on PYTHONPATH (tests/pipeline/test_two_nodes.py).
"""

import os
from pathlib import Path

import protocol.machine
import protocol.memory_nodes

protocol.machine.ROOT = Path(os.environ["FAKE_MACHINE_ROOT"])


def _grant(address: int, num_bytes: int, node: int) -> None:
    assert address % 4096 == 0
    assert num_bytes > 0
    assert node in (0, 1)


protocol.memory_nodes.prefer_node = _grant
