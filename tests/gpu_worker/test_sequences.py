"""Which positions a sequence holds is checked before anything is computed."""

from __future__ import annotations

import pytest

from gpu_worker.sequences import Sequences
from protocol.errors import ProtocolError


def _sequences() -> Sequences[list[int]]:
    return Sequences(new_cache=list, max_tokens=10)


def test_steps_continue_where_the_last_one_ended() -> None:
    sequences = _sequences()
    cache = sequences.begin_step(1, 0, 4)
    sequences.end_step(1, [7] * 4)
    assert sequences.begin_step(1, 4, 1) is cache
    sequences.end_step(1, [7] * 1)
    assert sequences.begin_step(1, 5, 5) is cache


@pytest.mark.parametrize("start", [1, 3, 5])
def test_a_step_that_starts_elsewhere_is_refused(start: int) -> None:
    sequences = _sequences()
    sequences.begin_step(1, 0, 4)
    sequences.end_step(1, [7] * 4)
    with pytest.raises(ProtocolError, match=f"position {start} of sequence 1, .* holds 4"):
        sequences.begin_step(1, start, 1)


def test_a_sequence_may_begin_anew() -> None:
    sequences = _sequences()
    first = sequences.begin_step(1, 0, 4)
    sequences.end_step(1, [7] * 4)
    second = sequences.begin_step(1, 0, 2)
    sequences.end_step(1, [7] * 2)
    assert second is not first
    assert sequences.begin_step(1, 2, 1) is second
    assert len(sequences) == 1


def test_a_dropped_sequence_is_gone() -> None:
    sequences = _sequences()
    sequences.begin_step(1, 0, 4)
    sequences.end_step(1, [7] * 4)
    sequences.drop(1)
    sequences.drop(1)
    assert len(sequences) == 0
    with pytest.raises(ProtocolError, match="holds 0"):
        sequences.begin_step(1, 4, 1)


def test_a_sequence_is_bounded() -> None:
    sequences = _sequences()
    sequences.begin_step(1, 0, 10)
    sequences.end_step(1, [7] * 10)
    with pytest.raises(ProtocolError, match="would hold 11 positions, 10 are allowed"):
        sequences.begin_step(1, 10, 1)
