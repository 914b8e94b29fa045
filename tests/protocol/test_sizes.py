"""Sizes as people read them."""

from __future__ import annotations

import pytest

from protocol.sizes import part_of, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 MB"),
        (49_152, "49.2 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (9_994_999, "9.99 MB"),
        (9_995_000, "10.0 MB"),
        (99_950_000, "100 MB"),
        (999_500_000, "1.00 GB"),
        (25_280_000_000, "25.28 GB"),
        (2_000_000_000_000, "2000.00 GB"),
    ],
)
def test_size(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_a_part_is_in_the_unit_of_the_whole() -> None:
    assert part_of(3_200_000, 9_500_000) == "3.2 of 9.5 MB"
    assert part_of(3_200_000, 12_000_000_000) == "0.00 of 12.00 GB"
