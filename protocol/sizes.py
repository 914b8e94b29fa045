"""Numbers of bytes for people, in one kind of unit everywhere: decimal, as --vram-gb is."""

from __future__ import annotations

#: What would be rounded up to 1000 of the smaller unit is 1 of the larger.
_FROM_GB, _FROM_MB = 999_500_000, 999_500


def size(num_bytes: int) -> str:
    """1610612736 -> "1.61 GB", 51200 -> "51.2 kB": three digits, of GB two behind the point."""
    if num_bytes >= _FROM_GB:
        return f"{num_bytes / 1e9:.2f} GB"
    if not num_bytes:
        return "0 MB"
    value, unit = (num_bytes / 1e6, "MB") if num_bytes >= _FROM_MB else (num_bytes / 1e3, "kB")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def part_of(done_bytes: int, total_bytes: int) -> str:
    """How far something is, both in the unit of the whole: "3.2 of 9.5 MB"."""
    if total_bytes >= _FROM_GB:
        return f"{done_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB"
    return f"{done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB"
