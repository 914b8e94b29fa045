"""How a pipeline ends."""

from __future__ import annotations

import msgspec

from orchestrator.loading import LoaderFault
from protocol.errors import EXIT_FAULT, EXIT_OK, UserError


class Ending(msgspec.Struct, frozen=True):
    """An exit code and, unless all is well, one sentence."""

    exit_code: int = EXIT_OK
    sentence: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> Ending:
        """By what a person can put right; anything else is raised."""
        if isinstance(error, UserError):
            return cls(error.exit_code, str(error))
        if isinstance(error, LoaderFault):
            return cls(EXIT_FAULT, f"Loading failed: {error}.")
        assert error is not None  # serving has no other end
        raise error
