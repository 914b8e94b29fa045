"""One token as text and bytes, for reports of log probabilities.

A token of a byte-level vocabulary may be part of a character: its bytes are then more than its
text says. Vocabularies write bytes in two ways: each byte as a printable stand-in (GPT-2's table),
or as `<0x0A>` beside plain text with `\u2581` for a space (SentencePiece).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.text_model import TextModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def _stand_ins() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for 256, 257, ..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


def token_bytes(model: TextModel, token: int) -> bytes:
    """What the token adds to a text, in UTF-8; a special token is its name."""
    entry = model.entry(token)
    if entry is None:
        return b""
    if model.is_byte_level:
        table = _stand_ins()
        if all(character in table for character in entry):
            return bytes(table[character] for character in entry)
        return entry.encode()
    found = _BYTE_TOKEN.fullmatch(entry)
    return bytes([int(found[1], 16)]) if found else entry.replace("\u2581", " ").encode()
