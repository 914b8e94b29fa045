"""Is there matplotlib? Asked before the work that a plot would show."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


def need_matplotlib(path: Path) -> None:
    """Raises UserError: it is not installed, or `path` is of no kind that it writes."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot writes .png, .svg or .pdf, not {path.name!r}.")
    if not path.parent.is_dir() or path.is_dir():
        raise UserError(f"--plot {path} cannot be written: there is no such folder, or it is one.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "--plot needs matplotlib in the environment that runs headrace; install it: "
            f"{sys.executable} -m pip install matplotlib"
        )
