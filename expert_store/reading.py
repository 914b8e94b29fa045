"""Moving checkpoint bytes into the segment: small pieces, checked while they are in the cache.

Each thread owns one piece-sized buffer: read a piece of the file into it, look for values that are
not finite, convert if the store has another dtype, write it to its place. The segment is written
with ``pwrite``, not through a mapping: the kernel then neither zeroes a page before it is
overwritten nor takes a fault per page, and the loader's own resident memory stays small. The
checkpoint is never mapped either: a file that shrinks while it is read is an error, not SIGBUS.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from expert_store.checkpoint import Checkpoint, CheckpointError, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from expert_store.layout import Dtype

    #: Puts bytes into a segment at an offset. Raises OSError.
    Write = Callable[[memoryview, int], None]

PIECE_BYTES = 1024 * 1024

TORCH_DTYPE: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
# A float whose exponent bits are all ones is an infinity or a NaN. Read as integers, those are the
# largest positive values (sign 0) and the largest unsigned values (sign 1): two integer maxima
# find them, exactly and at memory speed.
_EXPONENT: dict[torch.dtype, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]]
_EXPONENT = {
    torch.float32: (np.int32, np.uint32, 0x7F800000),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
}


class Copy(msgspec.Struct, frozen=True):
    """A run of bytes of one tensor and where its elements go in the segment."""

    source: TensorEntry
    skip_bytes: int
    """Into the source."""
    num_bytes: int
    """Of the source; the destination has as many elements in its own dtype."""
    target_offset_bytes: int | None
    """In the segment; None: only check the values."""
    target_name: str
    """The parameter of the model."""


def all_finite(raw: npt.NDArray[np.uint8], dtype: torch.dtype) -> bool:
    """True when no element of the bytes is infinite or NaN. ``raw``: whole elements, contiguous."""
    signed, unsigned, exponent = _EXPONENT[dtype]
    if raw.size == 0:
        return True
    sign = 1 << (8 * np.dtype(unsigned).itemsize - 1)
    return bool(raw.view(signed).max() < exponent and raw.view(unsigned).max() < (sign | exponent))


class PieceBuffers:
    """One thread's room: for a piece as read, and as converted to at most twice the width."""

    def __init__(self) -> None:
        self.read = memoryview(bytearray(PIECE_BYTES))
        self.converted = torch.empty(2 * PIECE_BYTES, dtype=torch.uint8)


class SourceFiles:
    """Open shards, read by position. Closing is the owner's duty."""

    def __init__(self, checkpoint: Checkpoint, *, drop_cache: bool) -> None:
        self._checkpoint = checkpoint
        self._drop_cache = drop_cache
        self._fds: dict[str, int] = {}
        try:
            for name in checkpoint.file_bytes:
                self._fds[name] = os.open(checkpoint.directory / name, os.O_RDONLY | os.O_CLOEXEC)
                os.posix_fadvise(self._fds[name], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            self.close()
            raise

    def read(self, source: TensorEntry, skip_bytes: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the tensor. Raises CheckpointError when the bytes are not there."""
        fd, offset, filled = self._fds[source.file_name], source.offset_bytes + skip_bytes, 0
        while filled < len(buffer):
            try:
                num_read = os.preadv(fd, [buffer[filled:]], offset + filled)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path(source)}: cannot be read: {error.strerror or error}"
                ) from error
            if num_read == 0:
                raise CheckpointError(
                    f"{self.path(source)}: became shorter while tensor {source.name} was read;"
                    " leave the file alone and load again"
                )
            filled += num_read
        if self._drop_cache:
            os.posix_fadvise(fd, offset, len(buffer), os.POSIX_FADV_DONTNEED)

    def require_finite(
        self, raw: npt.NDArray[np.uint8], dtype: torch.dtype, source: TensorEntry
    ) -> None:
        """Raises CheckpointError naming the tensor when a value is infinite or NaN."""
        if not all_finite(raw, dtype):
            values = torch.from_numpy(raw).view(dtype)
            what = "NaN" if bool(values.isnan().any()) else "infinite values"
            raise CheckpointError(
                f"{self.path(source)}: tensor {source.name} holds {what};"
                " the checkpoint is damaged, download it again"
            )

    def copy(self, piece: Copy, write: Write, dtype: Dtype, buffers: PieceBuffers) -> int:
        """Do one Copy of at most PIECE_BYTES into a segment; returns the bytes read.

        Raises CheckpointError for values that are not finite, in the file or after conversion.
        """
        source = piece.source
        part = buffers.read[: piece.num_bytes]
        self.read(source, piece.skip_bytes, part)
        raw = np.frombuffer(part, dtype=np.uint8)
        from_dtype, to_dtype = TORCH_DTYPE[source.dtype], TORCH_DTYPE[dtype]
        self.require_finite(raw, from_dtype, source)
        if piece.target_offset_bytes is None:
            return piece.num_bytes
        if from_dtype != to_dtype:
            values = torch.from_numpy(raw).view(from_dtype)
            room = buffers.converted[: values.numel() * to_dtype.itemsize]
            converted = room.view(to_dtype).copy_(values)
            raw = self.checked_bytes(converted, source)
        write(raw.data, piece.target_offset_bytes)
        return piece.num_bytes

    def checked_bytes(self, converted: torch.Tensor, source: TensorEntry) -> npt.NDArray[np.uint8]:
        """Bytes of a converted tensor. Raises CheckpointError when the dtype could not hold it."""
        raw: npt.NDArray[np.uint8] = converted.contiguous().reshape(-1).view(torch.uint8).numpy()
        if not all_finite(raw, converted.dtype):
            name = str(converted.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self.path(source)}: tensor {source.name} has values too large for {name};"
                " choose --dtype bfloat16 or float32"
            )
        return raw

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def path(self, source: TensorEntry) -> str:
        """Which file a tensor is in, for messages."""
        return str(self._checkpoint.directory / source.file_name)


def write_all(fd: int, data: memoryview, offset_bytes: int) -> None:
    """pwrite until everything is written. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset_bytes + done)
