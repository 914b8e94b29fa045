"""Recorded routing that takes the router's place: read before anything else, because the file may
be wrong, and compared with the model as soon as the loader knows its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.simulate.trace import read_trace
from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from expert_store.layout import StoreLayout


class ReplayedRouting:
    """The trace that `--replay-routing` names."""

    def __init__(self, path: Path) -> None:
        """Raises UserError: there is no such file, or it is no trace."""
        self._path = path
        self._trace = read_trace(path)

    def check(self, layout: StoreLayout) -> None:
        """Raises UserError when the trace is of a model of another shape."""
        trace = self._trace
        fits = (
            trace.num_layers >= layout.num_layers
            and trace.num_experts <= min(layout.num_experts)
            and trace.top_k == layout.top_k
        )
        if not fits:
            raise UserError(
                f"{self._path} records {trace.num_layers} layers of {trace.num_experts} experts, "
                f"top-{trace.top_k}, and the model has {layout.num_layers} of "
                f"{max(layout.num_experts)}, top-{layout.top_k}: to replay it a model needs the "
                "same top-k, no more layers and no fewer experts; "
                "benchmarks/random_checkpoint.py makes one of any shape."
            )

    def ids(self, layout: StoreLayout) -> npt.NDArray[np.int16]:
        """What the model can follow, int16 [steps, layers, top_k]; raises as `check` does."""
        self.check(layout)
        return self._trace.ids[:, : layout.num_layers].copy()
