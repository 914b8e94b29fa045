"""Ctrl-C ends a command even when the interpreter has dropped the exception."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_DROPPED = """
import os, signal
from orchestrator.cli.interrupts import Interrupts

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs in here
            pass

with Interrupts() as interrupts:
    Dropping()
    print("went on", flush=True)
    interrupts.check()
    print("was not told")
"""


def test_an_interrupt_that_a_destructor_swallows_is_told_by_check() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DROPPED], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "went on\n"
    assert "Exception ignored" in done.stderr
    assert done.returncode in (1, 130, -signal.SIGINT)
    assert "KeyboardInterrupt" in done.stderr


def test_it_interrupts_at_once_and_the_handler_from_before_comes_back() -> None:
    from orchestrator.cli.interrupts import Interrupts

    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is before
