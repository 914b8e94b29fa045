"""How a pipeline ends."""

from __future__ import annotations

import logging

import msgspec

from orchestrator.loading import LoaderFault
from protocol.errors import EXIT_FAULT, EXIT_OK, UserError

log = logging.getLogger("headrace")


class Ending(msgspec.Struct, frozen=True):
    """An exit code and, unless all is well, one sentence."""

    exit_code: int = EXIT_OK
    sentence: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> Ending:
        """By what a person can put right. Anything else is a fault of ours, and its traceback goes
        to the log: it is not raised, because workers must be ended whatever went wrong."""
        if isinstance(error, UserError):
            return cls(error.exit_code, str(error))
        if isinstance(error, LoaderFault):
            return cls(EXIT_FAULT, f"Loading failed: {error}.")
        log.error("fault: %s", error, exc_info=error)
        return cls.own_fault()

    def and_lost(self, sentence: str) -> Ending:
        """With what could not be kept; "" where nothing was lost."""
        if not sentence:
            return self
        return Ending(self.exit_code or EXIT_FAULT, f"{self.sentence} {sentence}".strip())

    @classmethod
    def own_fault(cls) -> Ending:
        """Of a fault that was logged."""
        return cls(
            EXIT_FAULT,
            "The orchestrator met a fault of its own, shown above; start it again, and report the "
            "fault if it comes back.",
        )
