"""A client of a running pipeline: asks for tokens and for status.

A client joins the life line as a worker does, for the same reason: to learn at once that the
orchestrator is gone. It gives the granted descriptors back immediately, so that it keeps no weights
alive, and never says HELLO.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING

from protocol.channel import DealerChannel
from protocol.codec import to_client
from protocol.errors import OrchestratorGone, UserError
from protocol.lifeline import Lifeline
from protocol.messages import (
    Accepted,
    Cancel,
    Finished,
    Generate,
    Generated,
    GetStatus,
    Rejected,
    RequestId,
    SamplingParams,
    Status,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protocol.messages import ClientReply
    from protocol.run_dir import RunDir

_STATUS_TIMEOUT_S = 10.0
_STATUS_EVERY_S = 0.2


class PipelineClient:
    """One connection to one orchestrator."""

    def __init__(self, lifeline: Lifeline, channel: DealerChannel[ClientReply]) -> None:
        self._lifeline = lifeline
        self._channel = channel

    @classmethod
    def connect(
        cls, run_dir: RunDir, wait_s: float, is_alive: Callable[[], bool] = lambda: True
    ) -> PipelineClient:
        """Wait up to `wait_s` for an orchestrator to listen, then until its model is loaded.

        Raises:
            UserError: nobody listens.
            OrchestratorGone: it went away, or `is_alive` said no while nobody listened yet.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                lifeline = Lifeline.connect(run_dir, 0)
                break
            except UserError:
                if not is_alive():
                    raise OrchestratorGone("the orchestrator ended before it listened") from None
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
        for fd, _ in lifeline.segments.values():
            os.close(fd)
        lifeline.segments = {}
        return cls(lifeline, DealerChannel(run_dir, to_client(), lifeline.fileno()))

    def status(self) -> Status:
        """Raises OrchestratorGone; UserError when no answer comes in time."""
        self._channel.send(GetStatus())
        deadline = time.monotonic() + _STATUS_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            reply = self._channel.receive(left_s)
            if isinstance(reply, Status):
                return reply
        raise UserError(
            f"The orchestrator has not answered within {_STATUS_TIMEOUT_S:.0f} s; look at its log."
        )

    def wait_until_ready(self, timeout_s: float, on_wait: Callable[[Status], None]) -> None:
        """Until the workers are there. Raises OrchestratorGone, UserError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not (status := self.status()).is_ready:
            on_wait(status)
            if time.monotonic() > deadline:
                raise UserError(
                    f"No {' and no '.join(status.missing_roles)} has joined within "
                    f"{timeout_s:.0f} s; start them with the same --run-dir."
                )
            time.sleep(_STATUS_EVERY_S)

    def generate(
        self,
        prompt: str,
        *,
        prompt_tokens: list[int] | None = None,
        max_tokens: int,
        sampling: SamplingParams,
        ignore_eos: bool = False,
    ) -> Iterator[Accepted | Generated | Finished | Status]:
        """Everything the orchestrator says about one new request, `Finished` last.

        Raises:
            UserError: the request was rejected; its sentence.
            OrchestratorGone: it went away meanwhile.
        """
        name = RequestId(uuid.uuid4().hex)
        self._channel.send(Generate(name, prompt, prompt_tokens, max_tokens, ignore_eos, sampling))
        is_over = False
        try:
            while not is_over:
                reply = self._channel.receive()
                if reply is None:
                    continue
                if isinstance(reply, Rejected):
                    is_over = True
                    raise UserError(reply.sentence)
                is_over = isinstance(reply, Finished)
                yield reply
        finally:
            if not is_over:
                self._channel.send(Cancel(name))

    def close(self) -> None:
        self._channel.close()
        self._lifeline.close()


def ask_status(run_dir: RunDir) -> Status:
    """Status of a pipeline that may still be loading (so without waiting for its grant).

    Raises:
        UserError: nobody answers.
    """
    run_dir.check_joinable()
    never, other = os.pipe()
    channel = DealerChannel(run_dir, to_client(), never)
    try:
        channel.send(GetStatus())
        reply = channel.receive(_STATUS_TIMEOUT_S)
    except OrchestratorGone:
        reply = None
    finally:
        channel.close()
        os.close(never)
        os.close(other)
    if not isinstance(reply, Status):
        raise UserError(
            f"No orchestrator answers in {run_dir.path}; start `headrace orchestrator --model DIR` "
            "first, or name its --run-dir."
        )
    return reply
