"""The instruction sets of this processor that matter to expert kernels, for reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: In the order they are shown: x86-64 names first, then those of 64-bit Arm.
_NOTABLE = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16",
    "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


def read_isa(root: Path) -> str:
    """Such as "avx2 avx512f amx_bf16"; "" where /proc/cpuinfo says nothing."""
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return " ".join(flag for flag in _NOTABLE if flag in flags)
    return ""
