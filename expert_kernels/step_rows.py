"""The activation segment in torch's eyes, and the rows of a layer-step that chose an expert.

`ActivationViews` lays tensors over the shared memory (see protocol.step_segment for the layout).
`StepRows` is one layer-step: it finds once, for all experts asked for, which rows chose them and
where their results go. `run_expert` then gathers, computes and scatters one expert:

    hidden[row_ids]  --ExpertFunction-->  rows[row, choice]

A place in `rows` is row * top_k + choice, and every place has exactly one writer, whoever computes
the expert there. With a single row (decode of one sequence) no index tensor is made at all:
its input is `hidden[0:1]` where it lies, as aligned and contiguous as a gathered copy.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.errors import ProtocolError
from protocol.step_segment import (
    HEADER_LAYER,
    HEADER_NUM_ROWS,
    HEADER_ROWS_APART,
    HEADER_STEP,
)

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from expert_kernels.reference import ExpertFunction
    from protocol.lifeline import FieldLayout, SegmentGrant

_FIELD_DTYPE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
}

#: expert -> (row_ids, place_ids), both int64 [rows that chose it], rows ascending.
RowsByExpert = dict[int, tuple[torch.Tensor, torch.Tensor]]


def as_tensor(
    memory: mmap.mmap | memoryview, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]
) -> torch.Tensor:
    """A tensor over shared memory, no copy. Over a read-only map it must only be read: torch
    cannot know, and the kernel would end a process that writes."""
    num_items = 1
    for extent in shape:
        num_items *= extent
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=dtype, count=num_items, offset=offset_bytes).view(
            *shape
        )


class ActivationViews:
    """Views of one mapped activation segment; the map lives as long as they do.

    `header` int64 [8] is a memoryview, since the processor reads it item by item; `hidden` dtype
    [max_rows, hidden_size], `choices` int32 [max_rows, top_k] and `rows` float32
    [max_rows, top_k, hidden_size] are tensors; `places` is `rows` as [max_rows * top_k,
    hidden_size]. `first_choices` is a memoryview of the first row of `choices`: a decode step
    reads no other, and a tensor's operations take long when the weights have emptied the caches.
    """

    def __init__(self, memory: mmap.mmap, grant: SegmentGrant) -> None:
        header = grant.fields["header"]
        start = header.offset_bytes
        self.header = memoryview(memory)[start : start + 8 * header.shape[0]].cast("q")
        self.hidden = _field(memory, grant.fields["hidden"])
        self.choices = _field(memory, grant.fields["choices"])
        self.rows = _field(memory, grant.fields["rows"])
        self.max_rows, self.top_k = self.choices.shape
        start = grant.fields["choices"].offset_bytes
        self.first_choices = memoryview(memory)[start : start + 4 * self.top_k].cast("i")
        self.places = self.rows.view(self.max_rows * self.top_k, -1)
        self.first_row = self.hidden[0:1]
        self.first_places = [self.places[k : k + 1] for k in range(self.top_k)]

    def write_header(
        self, step: int, layer: int, num_rows: int, *, rows_apart: bool = False
    ) -> None:
        """Say what the segment holds now; the writer's last act before `Routed`."""
        self.header[HEADER_STEP] = step
        self.header[HEADER_LAYER] = layer
        self.header[HEADER_NUM_ROWS] = num_rows
        self.header[HEADER_ROWS_APART] = rows_apart

    @property
    def rows_apart(self) -> bool:
        """Whether each row is another sequence's, and is to have the bits it would have alone."""
        return bool(self.header[HEADER_ROWS_APART])

    def read_header(self) -> tuple[int, int, int]:
        """(step, layer, num_rows).

        Raises:
            ProtocolError: more rows than there is room for.
        """
        num_rows = self.header[HEADER_NUM_ROWS]
        if not 0 <= num_rows <= self.max_rows:
            raise ProtocolError(f"the activation header claims {num_rows} of {self.max_rows} rows")
        return self.header[HEADER_STEP], self.header[HEADER_LAYER], num_rows


def _field(memory: mmap.mmap, field: FieldLayout) -> torch.Tensor:
    return as_tensor(memory, _FIELD_DTYPE[field.dtype], field.offset_bytes, field.shape)


@dataclass(frozen=True)
class StepRows:
    """Rows of one layer-step, for the experts it was made for.

    `hidden` [n, hidden_size], contiguous, holds the rows that enter. With one row, `choice_of` maps
    an expert to its choice index and `by_expert` is empty; otherwise, or when the row names an
    expert twice (routers do not, a table of experts by token may), the other way round. With
    `rows_apart` a row's bits must be those it would have alone, so who adds in an order that hangs
    on the number of rows computes one after the other.
    """

    views: ActivationViews
    hidden: torch.Tensor
    choice_of: dict[int, int]
    by_expert: RowsByExpert
    rows_apart: bool = False

    @classmethod
    def of(
        cls,
        views: ActivationViews,
        num_rows: int,
        experts: Sequence[int],
        hidden: torch.Tensor | None = None,
        *,
        rows_apart: bool = False,
    ) -> StepRows:
        """Find the rows of `experts` among the first `num_rows`; nobody's choice has none.
        `hidden` is by default what was published."""
        if num_rows == 1:
            chosen = views.first_choices.tolist()
            choice_of = {expert: k for k, expert in enumerate(chosen)}
            if len(choice_of) == len(chosen):
                return cls(views, views.first_row if hidden is None else hidden, choice_of, {})
        hidden = views.hidden if hidden is None else hidden
        return cls(views, hidden, {}, rows_of(views.choices, num_rows, experts), rows_apart)


def rows_of(choices: torch.Tensor, num_rows: int, experts: Sequence[int]) -> RowsByExpert:
    """Which rows chose each of `experts`, and where in `places` their results go.

    `choices` is int32 [>= num_rows, top_k]. One stable sort of all choices brings an expert's
    places together, still in row order. numpy, because its operations cost a fifth of torch's.
    """
    top_k = choices.shape[1]
    flat = choices.numpy()[:num_rows].reshape(-1)
    place_ids = flat.argsort(kind="stable")
    row_ids = place_ids // top_k
    ordered = flat[place_ids]
    starts = ordered.searchsorted(experts).tolist()
    ends = ordered.searchsorted(experts, side="right").tolist()
    return {
        expert: (torch.from_numpy(row_ids[start:end]), torch.from_numpy(place_ids[start:end]))
        for expert, start, end in zip(experts, starts, ends, strict=True)
    }


def run_expert(
    function: ExpertFunction, tensors: dict[str, torch.Tensor], step_rows: StepRows, expert: int
) -> None:
    """Compute `expert` for the rows that chose it, into their places."""
    views = step_rows.views
    choice = step_rows.choice_of.get(expert)
    if choice is not None:
        views.first_places[choice].copy_(function(tensors, step_rows.hidden))
        return
    found = step_rows.by_expert.get(expert)
    if found is not None and len(found[0]):
        row_ids, place_ids = found
        num_together = 1 if step_rows.rows_apart else len(row_ids)
        for start in range(0, len(row_ids), num_together):
            rows = row_ids[start : start + num_together]
            # index_select gives a fresh, contiguous, 64-byte aligned tensor.
            result = function(tensors, step_rows.hidden.index_select(0, rows))
            views.places.index_copy_(0, place_ids[start : start + num_together], result)
