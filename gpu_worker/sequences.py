"""The KV caches: one per running sequence, and the tokens whose positions it holds.

The orchestrator says where every step starts. This worker holds what earlier steps have left, so
the two must agree, and a disagreement is a fault, never a silent wrong answer. Each sequence has a
cache of transformers' own kind, built from the model's config, so that sliding-window and hybrid
models keep what their layers need and no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from protocol.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.messages import SequenceId

CacheT = TypeVar("CacheT")


class Sequences(Generic[CacheT]):
    """Caches by sequence. `new_cache` makes an empty one; `max_tokens` bounds each sequence."""

    def __init__(self, new_cache: Callable[[], CacheT], max_tokens: int) -> None:
        self._new_cache = new_cache
        self._max_tokens = max_tokens
        self._caches: dict[SequenceId, CacheT] = {}
        self._tokens: dict[SequenceId, list[int]] = {}

    def begin_step(self, sequence: SequenceId, start: int, num_tokens: int) -> CacheT:
        """The cache for a step that adds `num_tokens` positions from `start` on; 0 begins anew.

        Raises:
            ProtocolError: the sequence does not hold exactly `start` positions, or would outgrow
                its bound.
        """
        if start + num_tokens > self._max_tokens:
            raise ProtocolError(
                f"sequence {sequence} would hold {start + num_tokens} positions, "
                f"{self._max_tokens} are allowed"
            )
        if start == 0:
            self.drop(sequence)
            self._caches[sequence] = self._new_cache()
            self._tokens[sequence] = []
        held = len(self._tokens.get(sequence, ()))
        if sequence not in self._caches or held != start:
            raise ProtocolError(
                f"the step starts at position {start} of sequence {sequence}, "
                f"whose cache holds {held}"
            )
        return self._caches[sequence]

    def end_step(self, sequence: SequenceId, tokens: list[int]) -> None:
        """The step went through: the cache now holds the positions of `tokens`, too."""
        self._tokens[sequence] += tokens

    def tokens(self, sequence: SequenceId) -> list[int]:
        """All tokens whose positions the cache holds, the prompt's first."""
        return self._tokens[sequence]

    def drop(self, sequence: SequenceId) -> None:
        """Free the cache. A sequence that is not held (any more) is fine: commands may repeat."""
        self._caches.pop(sequence, None)
        self._tokens.pop(sequence, None)

    def __len__(self) -> int:
        return len(self._caches)
