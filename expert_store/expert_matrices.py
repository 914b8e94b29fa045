"""One expert's matrices, from wherever they lie to what a quantised store holds of them.

A job is one fused parameter of one expert: `gate_up` or `down` of expert 5 of a layer. Its sources
are plain or packed tensors of the checkpoint; its parts are matrices [outputs, inputs], gate and up
apart. Packed sources whose format is the store's keep their values; all others go through floats.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expert_store.conversion import read_tensor, require_shape, stacks
from expert_store.native_quantising import load_library, quantise_into
from expert_store.packed import PackedTensor
from expert_store.packing import QuantisedMatrix, dequantise, pack
from expert_store.quantising import quantise
from expert_store.reports import QuantisationErrors, TensorError
from expert_store.unpacking import read_floats, read_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from expert_store.checkpoint import Checkpoint, TensorEntry
    from expert_store.families import ModelShape
    from expert_store.formats import WeightFormat
    from expert_store.keys import ExpertParameter
    from expert_store.layout import ExpertForm, StoreLayout, TensorName
    from expert_store.reading import SourceFiles

_NUM_WORST = 8


@dataclass(frozen=True)
class MatrixJob:
    """A parameter of one expert and the tensors that hold it."""

    parameter: ExpertParameter
    expert: int
    sources: tuple[TensorEntry, ...]
    is_fused: bool
    """The sources hold all experts, this one at its number."""

    @property
    def num_bytes(self) -> int:
        """Of the checkpoint, to read."""
        return sum(
            source.num_bytes // (source.shape[0] if self.is_fused else 1) for source in self.sources
        )

    @property
    def label(self) -> str:
        """For reports."""
        return f"{self.parameter.path}[{self.expert}]"


@dataclass(frozen=True)
class Part:
    """A matrix [outputs, inputs]: as floats, or as codes."""

    floats: torch.Tensor | None = None
    coded: tuple[WeightFormat, QuantisedMatrix] | None = None

    def as_floats(self) -> torch.Tensor:
        if self.floats is not None:
            return self.floats
        assert self.coded is not None, "a part has one of the two"
        return torch.from_numpy(dequantise(*self.coded))


def matrix_jobs(
    parameter: ExpertParameter, shape: ModelShape, checkpoint: Checkpoint, num_experts: int
) -> list[MatrixJob] | None:
    """The jobs of a parameter, or None when only a converter of transformers can make it.

    Raises CheckpointError when a source has a shape that does not fit.
    """
    expected = tuple(shape.meta_model.get_parameter(parameter.path).shape)
    if parameter.converter is None:
        (source,) = next(iter(parameter.sources.values()))
        is_packed = isinstance(source, PackedTensor)
        turned = (*expected[:-2], *expected[:-3:-1])
        wanted = turned if is_packed and shape.form.is_transposed else expected
        require_shape(source, wanted, parameter, checkpoint)
        return [MatrixJob(parameter, e, (source,), True) for e in range(num_experts)]
    if not stacks(parameter.converter.operations):
        return None
    groups = [parameter.sources[pattern] for pattern in parameter.converter.source_patterns]
    is_packed = any(isinstance(source, PackedTensor) for group in groups for source in group)
    if any(len(group) != num_experts for group in groups):
        return None
    if is_packed and (shape.form.is_transposed or shape.form.is_interleaved):
        return None
    rows, *others = expected[1:]
    jobs = []
    for expert in range(num_experts):
        sources = tuple(group[expert] for group in groups)
        for source in sources:
            require_shape(source, (rows // len(sources), *others), parameter, checkpoint)
        jobs.append(MatrixJob(parameter, expert, sources, False))
    return jobs


def parts_of(
    job: MatrixJob, form: ExpertForm, weights: WeightFormat | None, files: SourceFiles
) -> list[Part]:
    """Read the job's matrices; gate before up. `form` is the model's own, `weights` the store's.

    Raises CheckpointError: not readable, or values that are not finite.
    """
    fused = job.expert if job.is_fused else None
    if not any(isinstance(source, PackedTensor) for source in job.sources):
        rows = None if fused is None else (fused, fused + 1)
        read = [read_tensor(source, rows, files) for source in job.sources]
        whole = torch.cat([tensor[0] if job.is_fused else tensor for tensor in read])
        return oriented(job.parameter.name, form, whole)
    parts = [_read_part(source, fused, weights, files) for source in job.sources]
    if len(parts) == 1 and job.parameter.name == "gate_up":
        return _halves(parts[0], form.is_interleaved)
    return parts


def oriented(name: str, form: ExpertForm, whole: torch.Tensor) -> list[Part]:
    """An expert's parameter as the model has it -> its matrices [outputs, inputs]."""
    matrix = whole.T if form.is_transposed else whole
    if name != "gate_up":
        return [Part(matrix)]
    return _halves(Part(matrix), form.is_interleaved)


def as_model_has_it(name: str, form: ExpertForm, parts: Sequence[Part]) -> torch.Tensor:
    """The inverse of `oriented`, as float32."""
    matrices = [part.as_floats() for part in parts]
    if name == "gate_up" and form.is_interleaved:
        matrix = torch.stack(matrices, dim=1).flatten(0, 1)
    else:
        matrix = torch.cat(matrices)
    return matrix.T if form.is_transposed else matrix


def concatenated_bias(job: MatrixJob, files: SourceFiles) -> torch.Tensor:
    """An interleaved bias [2 * intermediate] with the gates first."""
    bias = read_tensor(job.sources[0], (job.expert, job.expert + 1), files)[0]
    return torch.cat([bias[::2], bias[1::2]])


class QuantisedWriter:
    """Codes parts and counts how far they are from what they were. Threads may share it."""

    def __init__(self, layout: StoreLayout) -> None:
        assert layout.weights is not None, "only a quantised store has a writer"
        self._layout = layout
        self._weights: WeightFormat = layout.weights
        self._library = load_library()
        self._lock = threading.Lock()
        self._error_square = self._size_square = 0.0
        self._errors: list[TensorError] = []

    def block_bytes(
        self, name: TensorName, label: str, parts: Sequence[Part]
    ) -> npt.NDArray[np.uint8]:
        """What the store holds of one expert's parameter: uint8 [tiles, 2 or 1, tile_bytes]."""
        error_square = size_square = 0.0
        place = self._layout.tensor(name)
        block = np.zeros(place.shape, np.uint8)
        for way, part in enumerate(parts):
            if part.coded is not None and part.coded[0] == self._weights:
                block[:, way] = pack(self._weights, part.coded[1])
                continue
            error, size = self._quantise(part.as_floats(), block[:, way])
            error_square += error
            size_square += size
        if size_square:
            with self._lock:
                self._error_square += error_square
                self._size_square += size_square
                self._errors.append(TensorError(label, (error_square / size_square) ** 0.5))
        return block

    def _quantise(self, matrix: torch.Tensor, tiles: npt.NDArray[np.uint8]) -> tuple[float, float]:
        """Fill the tiles; sums of squared errors and of squared weights."""
        if self._library is not None:
            return quantise_into(self._library, self._weights, matrix, tiles)
        made = quantise(self._weights, matrix)
        tiles[:] = pack(self._weights, made.matrix)
        return made.error_square, made.size_square

    def errors(self) -> QuantisationErrors | None:
        """None when every value was kept as it was."""
        if not self._errors:
            return None
        worst = sorted(self._errors, key=lambda error: -error.relative_error)[:_NUM_WORST]
        mean = (self._error_square / self._size_square) ** 0.5
        return QuantisationErrors(self._weights.name, len(self._errors), mean, worst)


def _read_part(
    source: TensorEntry, fused: int | None, weights: WeightFormat | None, files: SourceFiles
) -> Part:
    if isinstance(source, PackedTensor):
        if "order" in source.parts and weights not in source.formats:
            return Part(torch.from_numpy(read_floats(source, files, fused)))  # in any order
        return Part(coded=read_matrix(source, files, fused, weights))
    rows = None if fused is None else (fused, fused + 1)
    tensor = read_tensor(source, rows, files)
    return Part(tensor if fused is None else tensor[0])


def _halves(part: Part, is_interleaved: bool) -> list[Part]:
    """Gate and up of one matrix that holds both."""

    def rows(take: Callable[[Any], Any]) -> Part:
        if part.floats is not None:
            return Part(take(part.floats))
        assert part.coded is not None, "a part has one of the two"
        weights, matrix = part.coded
        arrays = {
            name: np.ascontiguousarray(take(array))
            for name, array in vars(matrix).items()
            if array is not None
        }
        return Part(coded=(weights, replace(matrix, **arrays)))

    if is_interleaved:
        return [rows(lambda array: array[::2]), rows(lambda array: array[1::2])]
    return [
        rows(lambda array: array[: len(array) // 2]),
        rows(lambda array: array[len(array) // 2 :]),
    ]
