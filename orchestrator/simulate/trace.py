"""Routing traces: which experts each layer chose for each token, in order.

A trace is an `.npz` file with

    ids             int16 [steps, layers, top_k]   experts, the router's favourite first
    num_experts     int                            per layer
    request_starts  int32 [requests]               first step of each request (optional)
    phase           uint8 [steps]                  0 prefill, 1 decode (optional: all decode)
    model           str                            (optional)
    expert_bytes    int64 [layers]                 (optional)

Files come from strangers: nothing in them is unpickled, and sizes and ids are checked before use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.simulate.profiles import MAX_EXPERT_BYTES
from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

DECODE_PHASE = 1
#: How an .npz archive begins, an empty one, and a single array.
_MAGICS = (b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY")
_MAGIC_BYTES = max(map(len, _MAGICS))


@dataclass(frozen=True)
class RoutingTrace:
    """The decode steps of one recording, requests one after the other."""

    ids: npt.NDArray[np.int16]  # [steps, layers, top_k]
    num_experts: int
    model: str
    expert_bytes: int | None

    @property
    def num_steps(self) -> int:
        return int(self.ids.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    @property
    def total_experts(self) -> int:
        return self.num_layers * self.num_experts

    def part(self, first_step: int, num_steps: int | None) -> RoutingTrace:
        """`num_steps` steps from `first_step` on (None: all that follow); UserError if none are
        left."""
        end = None if num_steps is None else first_step + num_steps
        ids = self.ids[first_step:end]
        if not len(ids):
            raise UserError(
                f"The trace has {self.num_steps} decode steps, none from step {first_step} on; "
                "skip fewer."
            )
        return RoutingTrace(ids, self.num_experts, self.model, self.expert_bytes)


def read_trace(path: Path) -> RoutingTrace:
    """The decode steps of the trace in `path`.

    Raises:
        UserError: there is no such file, or it is no trace; one sentence says what is wrong.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no ordinary file; name a trace (.npz).")
        # Opened here, because numpy leaves it open when it turns out to be no archive.
        with path.open("rb") as file:
            magic = file.read(_MAGIC_BYTES)
            file.seek(0)
            if not magic.startswith(_MAGICS):  # numpy would speak of pickles
                raise UserError(
                    f"{path} is not a routing trace (.npz); `headrace trace record` makes one."
                )
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UserError(f"{path} is a single array, not a routing trace (.npz).")
            arrays: dict[str, Any] = {
                name: archive[name]
                for name in ("ids", "num_experts", "phase", "model", "expert_bytes")
                if name in archive.files
            }
        return _checked(path, arrays)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"There is no trace {path}; `headrace trace record` makes one.") from None
    except Exception as error:  # of a damaged file numpy, zipfile and zlib raise all kinds
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(
            f"{path} is not a readable .npz trace: {reason.rstrip('.')}; record it again."
        ) from None


def _checked(path: Path, arrays: dict[str, Any]) -> RoutingTrace:
    for name in ("ids", "num_experts"):
        if name not in arrays:
            raise UserError(f"{path} is no routing trace: it has no array {name!r}.")
    ids = arrays["ids"]
    if ids.ndim == 3 and not ids.size:
        raise UserError(f"{path}: the trace holds no steps; record a longer one.")
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            f"{path}: 'ids' must be whole numbers [steps, layers, top_k], "
            f"not {ids.dtype} {list(ids.shape)}."
        )
    num_experts = arrays["num_experts"]
    if num_experts.size != 1 or not np.issubdtype(num_experts.dtype, np.integer):
        raise UserError(f"{path}: 'num_experts' must be one whole number.")
    count = int(num_experts.reshape(()))
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count or count > np.iinfo(np.int16).max:
        raise UserError(
            f"{path}: 'ids' holds experts {low} to {high}, but there are {count} per layer."
        )
    ordered = np.sort(ids, axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise UserError(f"{path}: a layer chooses the same expert twice for one token.")
    phase = arrays.get("phase")
    if phase is not None:
        if phase.shape != ids.shape[:1]:
            raise UserError(f"{path}: 'phase' must have one entry per step.")
        ids = ids[phase == DECODE_PHASE]
        if not len(ids):
            raise UserError(f"{path}: the trace has no decode step.")
    sizes = arrays.get("expert_bytes")
    expert_bytes = None
    if sizes is not None:
        is_number = np.issubdtype(sizes.dtype, np.integer) or np.issubdtype(
            sizes.dtype, np.floating
        )
        is_number = is_number and sizes.size > 0
        if not is_number or not ((sizes >= 1) & (sizes <= MAX_EXPERT_BYTES)).all():
            raise UserError(
                f"{path}: 'expert_bytes' must be positive, from 1 to {MAX_EXPERT_BYTES:g}."
            )
        expert_bytes = int(sizes.mean())
    model = "unnamed"
    if "model" in arrays:
        if arrays["model"].size != 1 or not str(arrays["model"].item()).isprintable():
            raise UserError(f"{path}: 'model' must be one name.")
        model = str(arrays["model"].item())
    return RoutingTrace(ids.astype(np.int16, copy=False), count, model, expert_bytes)


def synthetic_trace(
    num_steps: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    *,
    seed: int = 0,
    keep: float = 0.45,
    skew: float = 0.7,
) -> RoutingTrace:
    """A made-up trace with what counts in real ones: a token keeps each expert of the last one with
    chance `keep` (0.44 on gpt-oss-20b), and new ones are drawn by a Zipf law of exponent `skew`
    over an order that differs from layer to layer. ValueError if top_k exceeds num_experts."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"cannot choose {top_k} of {num_experts} experts")
    chance = np.random.default_rng(seed)
    ids = np.empty((num_steps, num_layers, top_k), np.int16)
    weights = 1.0 / np.arange(1, num_experts + 1) ** skew
    log_weights = np.log(
        np.stack([weights[chance.permutation(num_experts)] for _ in range(num_layers)])
    )
    for step in range(num_steps):
        # Gumbel noise draws without replacement; what is kept comes before anything drawn.
        scores = log_weights + chance.gumbel(size=log_weights.shape)
        if step:
            kept = chance.random((num_layers, top_k)) < keep
            layers, places = np.nonzero(kept)
            scores[layers, ids[step - 1][layers, places]] += 1e3
        ids[step] = np.argsort(-scores, axis=1)[:, :top_k]
    return RoutingTrace(ids, num_experts, f"synthetic, seed {seed}", None)
