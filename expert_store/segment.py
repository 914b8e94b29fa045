"""The shared memory that holds an expert store: create, size, map, view.

The segment is a memfd: it has no name in any file system, needs no room in ``/dev/shm`` and
vanishes with the last process that holds it, whatever kills them. Its life:

    parent   fd = create_segment(name)        empty
    loader   size_segment(fd, total_bytes)    sized, then sealed: it can neither shrink nor grow
                                              any more, so no reader can meet SIGBUS
    loader   populate_huge_pages(fd, told)    where the kernel gives such pages to shared memory
    loader   pwrite, or into a mapping        blocks, and the header last: a half-loaded store does
                                              not decode
    workers  StoreView(fd)                    read-only view of blocks and tensors

Where an administrator has set huge pages aside (vm.nr_hugepages), a second memfd is made of those,
create_reserved_segment(name), and the loader takes it if reserve_pages(fd, ...) finds enough of
them. Such a segment is a whole number of its pages long, a little more than the store, and knows no
write(): only a mapping.

Writes are not sealed off: pinning host memory for a device may need a writable mapping.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from expert_store.layout import (
    HEADER_BYTES,
    DamagedHeaderError,
    StoreLayout,
    TensorDtype,
    TensorLayout,
    TensorName,
    WrongMagicError,
    align_up,
    decode_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from protocol.machine import HugetlbPool

NUMPY_DTYPE: dict[TensorDtype, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # numpy has no bfloat16: the raw 16 bits
    "uint8": np.uint8,
}

_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_OWN_COUNTERS = Path("/proc/self/smaps_rollup")
_MADV_POPULATE_WRITE = 23  # not in the mmap module; asm-generic/mman-common.h
_POPULATED_AT_ONCE = 256 * 1024 * 1024
_MFD_HUGE_SHIFT = 26  # the page size's logarithm lies there; linux/memfd.h


def create_segment(name: str) -> int:
    """A new, empty memfd; ``name`` shows in /proc/PID/fd. The caller owns the descriptor."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def size_segment(fd: int, total_bytes: int) -> None:
    """Give the segment its one and final size. Raises OSError when it is sealed already."""
    os.ftruncate(fd, total_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def most_free(pools: Sequence[HugetlbPool]) -> HugetlbPool | None:
    """The pool of reserved pages with the most free bytes; None where none has a free page."""
    pool = max(pools, key=lambda pool: pool.num_free * pool.page_bytes, default=None)
    return pool if pool is not None and pool.num_free else None


def create_reserved_segment(name: str, pool: HugetlbPool) -> int | None:
    """A new, empty memfd of reserved huge pages, of which it takes none yet; None where the kernel
    makes no such thing. The caller owns the descriptor."""
    page_bits = (pool.page_bytes.bit_length() - 1) << _MFD_HUGE_SHIFT
    try:
        return os.memfd_create(
            name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | page_bits
        )
    except OSError:
        return None


def reserve_pages(
    fd: int,
    total_bytes: int,
    told: Callable[[int], None],
    prepare: Callable[[mmap.mmap], None] = lambda _: None,
) -> mmap.mmap | None:
    """Size the empty segment of `create_reserved_segment` and take all its pages. Returns a
    writable mapping of it, or None when there are not enough: then the segment is empty again.

    All at once, because a page that is not there when somebody touches it is SIGBUS. ``prepare``
    sees the mapping before its first page is touched; ``told`` as in `populate_huge_pages`.
    """
    num_bytes = align_up(total_bytes, page_bytes(fd))
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        os.ftruncate(fd, num_bytes)
        region = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=protection)
    except OSError:
        os.ftruncate(fd, 0)
        return None
    try:
        prepare(region)
        _populate(region, num_bytes, told)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        region.close()
        os.ftruncate(fd, 0)
        return None
    return region


def write_into(region: mmap.mmap, data: memoryview, offset_bytes: int) -> None:
    """Copy into a mapping; other threads run meanwhile."""
    target = np.frombuffer(region, np.uint8, len(data), offset_bytes)
    np.copyto(target, np.frombuffer(data, np.uint8))


def page_bytes(fd: int) -> int:
    """The size of a segment's pages: of reserved huge ones, else the system's."""
    return os.fstatvfs(fd).f_bsize


def _populate(region: mmap.mmap, num_bytes: int, told: Callable[[int], None]) -> None:
    """Touch every page. Raises OSError when there is no memory, or no such call."""
    for start in range(0, num_bytes, _POPULATED_AT_ONCE):
        count = min(_POPULATED_AT_ONCE, num_bytes - start)
        region.madvise(_MADV_POPULATE_WRITE, start, count)
        told(start + count)


def huge_pages_enabled(setting: Path = _SHMEM_HUGE_PAGES) -> bool:
    """True when the kernel gives huge pages to shared memory that asks for them with madvise."""
    try:
        chosen = setting.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return False
    return chosen in ("always", "advise", "within_size", "force")


def populate_huge_pages(
    fd: int,
    told: Callable[[int], None],
    *,
    setting: Path = _SHMEM_HUGE_PAGES,
    counters: Path = _OWN_COUNTERS,
) -> int:
    """Put an empty segment into huge pages, as far as the kernel has them; returns their bytes.

    The kernel gives them only where memory is first touched through a mapping that asked for them:
    what a write() touches first is in small pages for good. Does nothing where huge pages are
    switched off for shared memory, or where the kernel cannot populate a mapping; nothing is lost
    by that but speed. ``told`` hears how many bytes are done, ascending.
    """
    if not huge_pages_enabled(setting):
        return 0
    num_bytes = os.fstat(fd).st_size
    before_bytes = _huge_bytes_mapped(counters)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    with mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=protection) as region:
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
            _populate(region, num_bytes, told)
        except OSError:
            pass  # no such call, or no memory: what is missing comes in small pages, by writing
        return _huge_bytes_mapped(counters) - before_bytes


def _huge_bytes_mapped(counters: Path) -> int:
    """Shared memory that this process has mapped in huge pages; 0 where the kernel does not say."""
    with contextlib.suppress(OSError):
        for line in counters.read_text().splitlines():
            if line.startswith("ShmemPmdMapped:"):
                return int(line.split()[1]) * 1024
    return 0


class SegmentMap:
    """A mapping of the whole segment. ``has_huge_pages`` tells whether the kernel gives them."""

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        num_bytes = os.fstat(fd).st_size
        if num_bytes == 0:
            raise WrongMagicError(
                "expert store: the segment is empty; the model has not been loaded into it"
            )
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=prot)
        self.num_bytes = num_bytes
        self.has_huge_pages = page_bytes(fd) > mmap.PAGESIZE
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
            self.has_huge_pages = self.has_huge_pages or huge_pages_enabled()
        self.memory = memoryview(self._map)

    def close(self) -> None:
        """Unmap. Views handed out before keep the mapping alive until they are gone."""
        self.memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class StoreView:
    """The experts of a loaded store, where they lie. The descriptor may be closed afterwards.

    ``layout`` is the decoded index, ``memory`` the whole segment. Raises StoreFormatError when the
    segment holds no store, or one whose size differs from what its header says.
    """

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        self._map = SegmentMap(fd, writable=writable)
        try:
            self.layout: StoreLayout = decode_header(self._map.memory[:HEADER_BYTES])
            total_bytes = self.layout.total_bytes
            if self._map.num_bytes not in (total_bytes, align_up(total_bytes, page_bytes(fd))):
                raise DamagedHeaderError(
                    f"expert store: the segment has {self._map.num_bytes} bytes,"
                    f" its header says {self.layout.total_bytes}; load the model again"
                )
        except BaseException:
            self._map.close()
            raise
        self.memory = self._map.memory
        self.has_huge_pages = self._map.has_huge_pages

    def block(self, layer: int, expert: int) -> memoryview:
        """All ``block_bytes`` bytes of one expert. Raises IndexError when there is none such."""
        start = self.layout.block_offset(layer, expert)
        return self.memory[start : start + self.layout.block_bytes]

    def tensors(self, layer: int, expert: int) -> dict[TensorName, npt.NDArray[Any]]:
        """The expert's tensors by name, shaped as in the layout; bfloat16 as uint16. No copies."""
        return block_arrays(self.layout, self.block(layer, expert))

    def close(self) -> None:
        """Unmap, once no view of a block is in use any more."""
        self._map.close()

    def __enter__(self) -> StoreView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def block_arrays(layout: StoreLayout, block: memoryview) -> dict[TensorName, npt.NDArray[Any]]:
    """Views of the tensors in one block's bytes (of the store, or of a slot with a copy)."""
    return {tensor.name: _array(tensor, block) for tensor in layout.tensors}


def _array(tensor: TensorLayout, block: memoryview) -> npt.NDArray[Any]:
    part = block[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
    return np.frombuffer(part, dtype=NUMPY_DTYPE[tensor.dtype]).reshape(tensor.shape)
