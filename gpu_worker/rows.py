"""The rows of one layer-step as the device sees them: route, publish, compute, join.

    route     which experts were chosen, and how often
    publish   hidden rows and choices -> activation segment, where some expert is not in a slot
    compute   experts that lie in slots -> result rows
    join      router-weighted sum of all result rows, wherever each was computed

`HostRows` is for a device that is the CPU: result rows are written where cpu_workers write theirs.
`DeviceRows` is for an accelerator: hidden rows go down to the segment, rows computed on the device
stay there, and only the others come up before the join.

**Order of additions.** sum = w[0]*r[0]; sum += w[1]*r[1]; ... over the router's choices k, best
first, all in float32, then one rounding to the hidden dtype. No step depends on who computed a row.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

from expert_kernels.step_rows import StepRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from expert_kernels.reference import ExpertFunction
    from expert_kernels.step_rows import ActivationViews
    from gpu_worker.slots import ExpertSlots
    from protocol.messages import ExpertId, SlotId

#: Above this many separate runs of rows, gathering them first is cheaper than copying each.
_MAX_UPLOAD_RUNS = 8


class Rows(Protocol):
    """One layer-step's rows. Calls come as: route, publish if others are to compute, any number of
    compute, join."""

    def route(
        self, hidden: torch.Tensor, choices: torch.Tensor, *, rows_apart: bool = False
    ) -> dict[ExpertId, int]:
        """Take hidden [n, H] and choices [n, K]. `rows_apart`: each row is to be computed to the
        bits that it would have alone.

        Returns:
            Rows per chosen expert, experts in the order in which the router names them.
        """

    def publish(self, step: int, layer: int) -> None:
        """Put what was routed where everybody sees it."""

    def compute(
        self, experts: Sequence[ExpertId], slots: Sequence[SlotId], num_elsewhere: int = 0
    ) -> None:
        """Begin to compute `experts` (all of them chosen) from `slots`, while others most likely
        compute `num_elsewhere`."""

    def wait_computed(self) -> int:
        """Block until no slot of the last `compute` is read any more; when that was, in ns."""

    def join(self, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n, H] in `dtype`: the sum of all result rows, weighted with weights [n, K]."""


def count_choices(chosen: list[list[ExpertId]]) -> dict[ExpertId, int]:
    """Rows per expert, experts in the order of their first mention: row by row, best first."""
    if len(chosen) == 1 and len(once := dict.fromkeys(chosen[0], 1)) == len(chosen[0]):
        return once
    counts: dict[ExpertId, int] = {}
    for row in chosen:
        for expert in row:
            counts[expert] = counts.get(expert, 0) + 1
    return counts


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum of weights[:, k] * rows[:, k] for k ascending.

    Args:
        rows: float32 [n, K, H].
        weights: [n, K], any float dtype.
        dtype: of the result.
    """
    factors = weights.float().unsqueeze(2).unbind(1)  # K x [n, 1]
    choices = rows.unbind(1)
    total = choices[0] * factors[0]
    for row, factor in zip(choices[1:], factors[1:], strict=True):
        total.addcmul_(row, factor)
    return total if dtype is torch.float32 else total.to(dtype)


class HostRows:
    """Rows of a device that is the CPU itself: result rows lie in the activation segment.

    `join` is `weighted_sum` or stands in for it (expert_kernels.native_join).
    """

    def __init__(
        self,
        views: ActivationViews,
        function: ExpertFunction,
        slots: ExpertSlots,
        join: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor] = weighted_sum,
    ) -> None:
        self._views = views
        self._function = function
        self._slots = slots
        self._sum = join
        # torch's functions read rows where cpu_workers read them, at one alignment; the native ones
        # give the same bits at every address.
        self._is_early = not function.takes_whole_steps
        self._hidden = views.hidden
        self._choices = views.choices
        self._rows_apart = False
        self._counts: dict[ExpertId, int] = {}
        self._step_rows: StepRows | None = None
        self._computed_ns = 0

    def route(
        self, hidden: torch.Tensor, choices: torch.Tensor, *, rows_apart: bool = False
    ) -> dict[ExpertId, int]:
        self._hidden, self._choices = hidden.contiguous(), choices
        chosen = choices.tolist()
        self._counts = count_choices(chosen)
        self._rows_apart = rows_apart
        self._step_rows = None
        if self._is_early:
            self._put_hidden()
        if len(chosen) == 1 and len(self._counts) == len(chosen[0]):
            choice_of = dict(zip(chosen[0], range(len(chosen[0])), strict=True))
            self._step_rows = StepRows(self._views, self._hidden, choice_of, {})
        else:
            self._views.choices[: len(chosen)].copy_(choices)
        return self._counts

    def _put_hidden(self) -> None:
        num_rows = self._hidden.shape[0]
        mine = self._views.first_row if num_rows == 1 else self._views.hidden[:num_rows]
        self._hidden = mine.copy_(self._hidden)

    def publish(self, step: int, layer: int) -> None:
        views, num_rows = self._views, self._hidden.shape[0]
        if not self._is_early:
            self._put_hidden()
        if num_rows == 1:
            views.choices[0:1].copy_(self._choices)
        views.write_header(step, layer, num_rows, rows_apart=self._rows_apart)

    def compute(
        self, experts: Sequence[ExpertId], slots: Sequence[SlotId], num_elsewhere: int = 0
    ) -> None:
        if self._step_rows is None:  # once per layer-step, and only if anything is resident
            self._step_rows = StepRows.of(
                self._views,
                self._hidden.shape[0],
                list(self._counts),
                self._hidden,
                rows_apart=self._rows_apart,
            )
        tensors = [self._slots.tensors(slot) for slot in slots]
        self._function.run_step(self._step_rows, experts, tensors)
        self._computed_ns = time.monotonic_ns()

    def wait_computed(self) -> int:
        return self._computed_ns

    def join(self, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._sum(self._views.rows[: self._hidden.shape[0]], weights, dtype)


class DeviceStream(Protocol):
    """What `DeviceRows` needs of the stream that it computes in."""

    def synchronize(self) -> None:
        """Block until everything launched so far is done."""

    def mark(self) -> None:
        """Remember this point of the stream."""

    def wait_mark(self) -> None:
        """Block until the stream has passed the last mark."""


class CudaStream:
    """The current CUDA stream of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def mark(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait_mark(self) -> None:
        self._event.synchronize()


class DeviceRows:
    """Rows of an accelerator. `views` lie in registered (page-locked) memory.

    Asynchronous copies from and to the segment need no further care for its reuse: `publish` of the
    next layer-step, after which others may write to it again, first waits for the stream.
    """

    def __init__(
        self,
        views: ActivationViews,
        function: ExpertFunction,
        slots: ExpertSlots,
        device: torch.device,
        stream: DeviceStream,
    ) -> None:
        self._views = views
        self._function = function
        self._slots = slots
        self._stream = stream
        self._places = torch.empty(views.places.shape, dtype=torch.float32, device=device)
        self._hidden = torch.empty(views.hidden.shape, dtype=views.hidden.dtype, device=device)
        self._num_rows = 0
        self._rows_apart = False
        self._chosen: list[ExpertId] = []
        self._counts: dict[ExpertId, int] = {}
        self._computed: set[int] = set()
        self._ordered: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    def route(
        self, hidden: torch.Tensor, choices: torch.Tensor, *, rows_apart: bool = False
    ) -> dict[ExpertId, int]:
        views = self._views
        num_rows = self._num_rows = hidden.shape[0]
        self._hidden[:num_rows].copy_(hidden)
        self._choices = choices.to(torch.int32)
        # One wait brings both: the rows are a few KB, and most layers publish them.
        views.hidden[:num_rows].copy_(self._hidden[:num_rows], non_blocking=True)
        views.choices[:num_rows].copy_(self._choices, non_blocking=True)
        self._stream.synchronize()
        chosen = views.choices[:num_rows].tolist()
        self._chosen = [expert for row in chosen for expert in row]
        self._counts = count_choices(chosen)
        self._computed.clear()
        self._ordered = None
        self._rows_apart = rows_apart
        return self._counts

    def publish(self, step: int, layer: int) -> None:
        self._views.write_header(step, layer, self._num_rows, rows_apart=self._rows_apart)

    def compute(
        self, experts: Sequence[ExpertId], slots: Sequence[SlotId], num_elsewhere: int = 0
    ) -> None:
        for expert, slot in zip(experts, slots, strict=True):
            tensors = self._slots.tensors(slot)
            if self._num_rows == 1 and len(self._counts) == len(self._chosen):
                choice = self._chosen.index(expert)
                result = self._function(tensors, self._hidden[0:1])
                self._places[choice : choice + 1].copy_(result)
            else:
                row_ids, place_ids = self._rows_of(expert)
                num_together = 1 if self._rows_apart else len(row_ids)
                for rows, places in zip(
                    row_ids.split(num_together), place_ids.split(num_together), strict=True
                ):
                    result = self._function(tensors, self._hidden.index_select(0, rows))
                    self._places.index_copy_(0, places, result)
        self._computed.update(experts)
        self._stream.mark()

    def _rows_of(self, expert: ExpertId) -> tuple[torch.Tensor, torch.Tensor]:
        """(row_ids, place_ids) of an expert, on the device, found without waiting for it: one
        stable sort brings each expert's places together, and the counts say where each begins."""
        if self._ordered is None:
            place_ids = self._choices.reshape(-1).sort(stable=True).indices
            row_ids = place_ids.div(self._views.top_k, rounding_mode="floor")
            self._ordered = {}
            start = 0
            for chosen in sorted(self._counts):
                end = start + self._counts[chosen]
                self._ordered[chosen] = (row_ids[start:end], place_ids[start:end])
                start = end
        return self._ordered[expert]

    def wait_computed(self) -> int:
        self._stream.wait_mark()
        return time.monotonic_ns()

    def join(self, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._upload([p for p, expert in enumerate(self._chosen) if expert not in self._computed])
        num_places = self._num_rows * self._views.top_k
        rows = self._places[:num_places].view(self._num_rows, self._views.top_k, -1)
        return weighted_sum(rows, weights, dtype)

    def _upload(self, places: list[int]) -> None:
        """Bring result rows that a cpu_worker computed to the device; `places` ascending."""
        if not places:
            return
        runs = runs_of(places)
        if len(runs) <= _MAX_UPLOAD_RUNS:
            for start, end in runs:
                self._places[start:end].copy_(self._views.places[start:end], non_blocking=True)
            return
        ids = torch.tensor(places)
        gathered = self._views.places.index_select(0, ids)
        self._places.index_copy_(0, ids.to(self._places.device), gathered.to(self._places.device))


def runs_of(places: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as half-open ranges: [1, 2, 5] -> [(1, 3), (5, 6)]."""
    runs: list[tuple[int, int]] = []
    start = end = places[0]
    for place in places:
        if place > end:
            runs.append((start, end))
            start = place
        end = place + 1
    runs.append((start, end))
    return runs
