"""A list of tensor operations for expert_kernels.native_dense, and the frame that they work in.

A program is built from torch tensors that stand for those of a step: each is given memory while
building (never touched), views of it are made by torch itself, and what the program keeps of an
operand is where it lies and how it is strided. When all operations are known, memory that is in use
at different times shares one place in the *frame*; a step that runs has a frame of its own, since
the steps of several sequences take turns within a layer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from expert_kernels.native_dense import MAX_DIMS, NO_VALUE, OP_CODES, VALUES, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGNMENT = 64
_LAST_STRIDE = (1 << 31) - 1


class NotNative(Exception):
    """There is no native kernel for an operation; the text names it."""


@dataclass
class _Memory:
    """A tensor's memory: in use from the operation `first` to the operation `last`."""

    num_bytes: int
    first: int
    last: int
    offset: int = -1


@dataclass
class _Planned:
    """An operation. Operands, out first, with their strides; None is the number x."""

    code: int
    sizes: list[int]
    operands: list[tuple[torch.Tensor, Sequence[int]] | None]
    x: float
    y: float
    n: int
    m: int


_LINEAR_CODES = frozenset(OP_CODES[name] for name in ("linear", "packed_linear"))


def _storage(operand: tuple[torch.Tensor, Sequence[int]] | None) -> int:
    return 0 if operand is None else operand[0].untyped_storage().data_ptr()


def _is_joined(a: _Planned, b: _Planned) -> bool:
    """Whether both are linear layers of the same rows in one format: num_together of dense.cpp."""
    if a.code != b.code or a.n != b.n or a.sizes[::2] != b.sizes[::2]:
        return False
    rows, others = a.operands[1], b.operands[1]
    if rows is None or others is None:
        return False
    return (
        rows[0].data_ptr() == others[0].data_ptr()
        and rows[0].dtype == others[0].dtype
        and list(rows[1]) == list(others[1])
    )


def _is_kept_apart(other: _Planned, planned: _Planned) -> bool:
    """Whether `planned` cannot come before `other`: one of them writes what the other has."""
    written, of_other = _storage(planned.operands[0]), _storage(other.operands[0])
    return written in map(_storage, other.operands) or of_other in map(_storage, planned.operands)


class ProgramBuilder:
    """Collects operations; `finish` makes the program. Only the thread of the worker builds."""

    def __init__(self) -> None:
        self._ops: list[_Planned] = []
        self._memory: dict[int, _Memory] = {}
        #: Memory is known by its address, so whoever has some stays.
        self._alive: list[torch.Tensor] = []

    @property
    def num_ops(self) -> int:
        return len(self._ops)

    def forget_from(self, num_ops: int) -> None:
        """Take back all operations from number `num_ops` on."""
        del self._ops[num_ops:]

    def gather_linears(self, start: int) -> None:
        """Among operations from number `start` on, move linear layers up to an earlier one of the
        same rows: such neighbours are run as one job."""
        for number in range(start + 1, len(self._ops)):
            planned = self._ops[number]
            if planned.code not in _LINEAR_CODES:
                continue
            places = [at for at in range(start, number) if _is_joined(self._ops[at], planned)]
            if not places:
                continue
            place = places[-1] + 1
            if any(_is_kept_apart(other, planned) for other in self._ops[place:number]):
                continue
            self._ops.insert(place, self._ops.pop(number))
            for memory in self._memory.values():
                # What was in use up to one of those that come later now.
                if place <= memory.last < number:
                    memory.last += 1
            written = self._memory.get(_storage(planned.operands[0]))
            if written is not None:
                written.first = min(written.first, place)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor in the frame, contiguous unless `strides` are given."""
        if dtype not in VALUES:
            raise NotNative(f"values of {dtype}")
        if strides is None:
            tensor = torch.empty(tuple(shape), dtype=dtype)
        else:
            tensor = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
        storage = tensor.untyped_storage()
        self._alive.append(tensor)
        self._memory[storage.data_ptr()] = _Memory(storage.nbytes(), self.num_ops, self.num_ops)
        return tensor

    def like(self, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in the frame with the shape and strides of `value`."""
        is_dense = value.numel() == value.untyped_storage().nbytes() // max(value.itemsize, 1)
        strides = value.stride() if is_dense and 0 not in value.stride() else None
        return self.empty(value.shape, dtype or value.dtype, strides)

    def is_in_frame(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is (a view of) one made by `empty`; all others are constants."""
        return tensor.untyped_storage().data_ptr() in self._memory

    def keep(self, constant: torch.Tensor) -> torch.Tensor:
        """A constant that nobody else holds."""
        self._alive.append(constant)
        return constant

    def touch(self, *tensors: torch.Tensor) -> None:
        """Whoever runs the program reads or writes these before the next operation."""
        for tensor in tensors:
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
            if memory is not None:
                memory.last = max(memory.last, self.num_ops)

    def elementwise(
        self,
        name: str,
        out: torch.Tensor,
        *operands: torch.Tensor | None,
        x: float = 0.0,
        y: float = 0.0,
    ) -> None:
        """out[i] = f(operands[i] ...), which are broadcast; None is the number x."""
        strided = [
            None if operand is None else (operand, operand.expand(out.shape).stride())
            for operand in operands
        ]
        sizes, strides = _collapse(list(out.shape), [out.stride(), *(s[1] for s in strided if s)])
        rest = iter(strides[1:])
        self._add(
            name,
            sizes,
            [(out, strides[0]), *((s[0], next(rest)) if s else None for s in strided)],
            x=x,
            y=y,
        )

    def rows(
        self,
        name: str,
        out: torch.Tensor,
        values: torch.Tensor,
        *others: tuple[torch.Tensor, Sequence[int]] | None,
        x: float = 0.0,
        n: int = 0,
        m: int = 0,
    ) -> None:
        """Rows along the last dimension of `values`. `out` has as many dimensions, whatever the
        size of its last; `others` come with their strides."""
        operands = [(out, out.stride()), (values, values.stride()), *others]
        strides = [operand[1] for operand in operands if operand]
        outer, collapsed = _collapse(list(values.shape[:-1]), [s[:-1] for s in strides])
        whole = iter([*of_outer, of[-1]] for of_outer, of in zip(collapsed, strides, strict=True))
        self._add(
            name,
            [*outer, values.shape[-1]],
            [(operand[0], next(whole)) if operand else None for operand in operands],
            x=x,
            n=n,
            m=m,
        )

    def other(
        self,
        name: str,
        sizes: Sequence[int],
        *operands: tuple[torch.Tensor, Sequence[int]] | None,
        x: float = 0.0,
        n: int = 0,
        m: int = 0,
    ) -> None:
        """An operation of its own kind; operands (out first) with their strides."""
        self._add(name, list(sizes), list(operands), x=x, n=n, m=m)

    def _add(
        self,
        name: str,
        sizes: list[int],
        operands: list[tuple[torch.Tensor, Sequence[int]] | None],
        *,
        x: float = 0.0,
        y: float = 0.0,
        n: int = 0,
        m: int = 0,
    ) -> None:
        if len(sizes) > MAX_DIMS:
            raise NotNative(f"{name} of {len(sizes)} dimensions")
        if 0 in sizes:
            return  # nothing to compute
        for operand in operands:
            if operand is None:
                continue
            tensor, strides = operand
            if tensor.dtype not in VALUES or tensor.device.type != "cpu":
                raise NotNative(f"{name} of {tensor.dtype} on {tensor.device.type}")
            if any(abs(stride) > _LAST_STRIDE for stride in strides):
                raise NotNative(f"{name} of a tensor of this size")
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
            if memory is not None:
                memory.last = max(memory.last, self.num_ops)
            else:
                self._alive.append(tensor)
        self._ops.append(_Planned(OP_CODES[name], sizes, operands, x, y, n, m))

    def finish(self) -> Program:
        """The program: from now on nothing is added."""
        num_bytes = _place(list(self._memory.values()))
        ops = (Op * max(len(self._ops), 1))()
        for op, planned in zip(ops, self._ops, strict=False):
            op.code, op.num_dims = planned.code, len(planned.sizes)
            op.sizes[: len(planned.sizes)] = planned.sizes
            op.x, op.y, op.n, op.m = planned.x, planned.y, planned.n, planned.m
            for number, operand in enumerate((op.out, op.a, op.b, op.c)):
                found = planned.operands[number] if number < len(planned.operands) else None
                if found is None:
                    operand.dtype = NO_VALUE
                    continue
                tensor, strides = found
                offset = self.offset_of(tensor)
                operand.offset = tensor.data_ptr() if offset < 0 else offset
                operand.is_in_frame = offset >= 0
                operand.dtype = VALUES[tensor.dtype]
                operand.strides[: len(strides)] = list(strides)
        return Program(self, ops, num_bytes)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where `tensor` begins in the frame, in bytes; -1 if it is a constant."""
        start = tensor.untyped_storage().data_ptr()
        memory = self._memory.get(start)
        return -1 if memory is None else memory.offset + tensor.data_ptr() - start


class Program:
    """Operations, and how large a frame they need. `ops` is their address."""

    def __init__(
        self, builder: ProgramBuilder, ops: ctypes.Array[Op], num_frame_bytes: int
    ) -> None:
        self._builder = builder  # holds the constants
        self._ops = ops
        self.ops = ctypes.addressof(ops)
        self.num_frame_bytes = num_frame_bytes

    def offset_of(self, tensor: torch.Tensor) -> int:
        """See ProgramBuilder."""
        return self._builder.offset_of(tensor)


class Frame:
    """Memory for one step under way. `address` is where it begins."""

    def __init__(self, program: Program) -> None:
        self._program = program
        room = torch.zeros(program.num_frame_bytes + _ALIGNMENT, dtype=torch.uint8)
        start = -room.data_ptr() % _ALIGNMENT
        self._bytes = room[start : start + program.num_frame_bytes]
        self.address = self._bytes.data_ptr()

    def bind(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of this frame that `tensor` stood for while building; constants are as they
        are."""
        offset = self._program.offset_of(tensor)
        if offset < 0:
            return tensor
        values = self._bytes[offset:]
        whole = values[: len(values) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset())


def _collapse(sizes: list[int], strides: list[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The same places in as few dimensions as can be, one at least."""
    kept: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(sizes):
        if size == 1:
            continue
        if kept and all(of[-1] == s[d] * size for of, s in zip(found, strides, strict=True)):
            kept[-1] *= size
            for of, s in zip(found, strides, strict=True):
                of[-1] = s[d]
            continue
        kept.append(size)
        for of, s in zip(found, strides, strict=True):
            of.append(s[d])
    if not kept:
        return [1], [[0] for _ in strides]
    return kept, found


def _place(memories: list[_Memory]) -> int:
    """Give each an offset such that none overlaps another in use at the same time; the end."""
    end = 0
    active: list[_Memory] = []  # ascending offsets
    for memory in sorted(memories, key=lambda m: m.first):
        active = [other for other in active if other.last >= memory.first]
        size = -(-max(memory.num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        offset, place = 0, 0
        for place, other in enumerate(active):  # noqa: B007 - where the gap is
            if other.offset - offset >= size:
                break
            offset = other.offset + -(-max(other.num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        else:
            place = len(active)
        memory.offset = offset
        active.insert(place, memory)
        end = max(end, offset + size)
    return end
