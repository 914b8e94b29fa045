"""Errors a person may cause, as one clear sentence, and the exit codes that go with them.

A `UserError` is never shown with a traceback: whoever owns the edge (a command line, an API)
prints its sentence and leaves with its exit code. Everything else is a fault of ours.
"""

from __future__ import annotations

import unicodedata

EXIT_OK = 0
#: Something unexpected; a supervisor may start the process again.
EXIT_FAULT = 1
#: Bad input. The message says what, where and what to do.
EXIT_USER_ERROR = 2
#: It would fail the same way again: a supervisor must not restart the process.
EXIT_DO_NOT_RESTART = 3


def visible(text: str) -> str:
    """`text` with control characters written out, line breaks and tabs aside."""
    if text.isprintable():
        return text
    return "".join(
        sign.encode("unicode_escape").decode() if _steers(sign) else sign for sign in text
    )


def _steers(sign: str) -> bool:
    return unicodedata.category(sign) in ("Cc", "Cf", "Cs") and sign not in "\n\t"


class UserError(Exception):
    """Bad input or surroundings, told in one sentence: what is wrong, where, what to do.

    A sentence may quote names that others chose, and it is meant for a terminal: what would steer
    that is written out (an escape as \\x1b).
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, sentence: str) -> None:
        super().__init__(visible(sentence))


class WorkFault(Exception):
    """Work that cannot be done by anybody, such as with numbers that overflow: told like a fault,
    but no bug, so without a traceback."""


class ProtocolError(Exception):
    """A frame, message or segment that does not follow the protocol; dropped and counted."""


class OrchestratorGone(Exception):
    """The orchestrator closed the life line of this worker; the worker must leave."""
