"""The few CUDA calls that moving experts takes, bound by ctypes, every return code checked.

A process that only copies needs no torch: loading the runtime library alone starts in
milliseconds and makes the smallest context. The gpu_worker uses the same calls for its in-process
fallback, so that both copy in the same way.

The runtime keeps the last error of a thread until somebody asks (`cudaGetLastError`); left there,
it surfaces in an unrelated call much later. So a failed call clears it before raising.

Names and values: CUDA Runtime API reference, stable since CUDA 11 (driver_types.h); device uuids
come from the driver API, whose function has a fixed signature, unlike the properties struct.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import sysconfig
from pathlib import Path
from typing import Any

IPC_HANDLE_BYTES = 64
SUCCESS = 0
ERROR_NOT_READY = 600
HOST_REGISTER_PORTABLE = 1
MEMCPY_HOST_TO_DEVICE = 1
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
IPC_LAZY_ENABLE_PEER_ACCESS = 1

_LIBRARY_NAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")


class CudaError(Exception):
    """A CUDA call failed. `code` is the runtime's error number; the sticky error is cleared."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed: {text} (error {code})")
        self.call = call
        self.code = code


class CudaUnavailable(Exception):
    """There is no CUDA runtime library or no driver here; the text says which."""


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t: 64 opaque bytes, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


_P = ctypes.c_void_p
_INT = ctypes.c_int
_UINT = ctypes.c_uint
_SIZE = ctypes.c_size_t

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaGetDeviceCount": (ctypes.POINTER(_INT),),
    "cudaSetDevice": (_INT,),
    "cudaHostRegister": (_P, _SIZE, _UINT),
    "cudaHostUnregister": (_P,),
    "cudaMalloc": (ctypes.POINTER(_P), _SIZE),
    "cudaFree": (_P,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(IpcHandle), _P),
    "cudaIpcOpenMemHandle": (ctypes.POINTER(_P), IpcHandle, _UINT),
    "cudaIpcCloseMemHandle": (_P,),
    "cudaStreamCreateWithFlags": (ctypes.POINTER(_P), _UINT),
    "cudaStreamSynchronize": (_P,),
    "cudaStreamDestroy": (_P,),
    "cudaMemcpyAsync": (_P, _P, _SIZE, _INT, _P),
    "cudaEventCreateWithFlags": (ctypes.POINTER(_P), _UINT),
    "cudaEventRecord": (_P, _P),
    "cudaEventQuery": (_P,),
    "cudaEventDestroy": (_P,),
    "cudaGetLastError": (),
}


class CudaRuntime:
    """The calls, as methods. `library` is a loaded libcudart and `driver` a loaded libcuda (None:
    uuids are not known); tests give objects with the same functions. Pointers, streams and events
    are plain ints. Every method raises `CudaError` when its call fails.
    """

    def __init__(self, library: Any, driver: Any = None) -> None:
        self._library = library
        self._driver = driver
        if isinstance(library, ctypes.CDLL):
            for name, argtypes in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes = list(argtypes)
                function.restype = _INT
            library.cudaGetErrorString.argtypes = [_INT]
            library.cudaGetErrorString.restype = ctypes.c_char_p
        if isinstance(driver, ctypes.CDLL):
            driver.cuInit.argtypes = [_UINT]
            driver.cuDeviceGet.argtypes = [ctypes.POINTER(_INT), _INT]
            driver.cuDeviceGetUuid_v2.argtypes = [ctypes.c_char_p, _INT]
            for name in ("cuInit", "cuDeviceGet", "cuDeviceGetUuid_v2"):
                getattr(driver, name).restype = _INT

    @classmethod
    def load(cls) -> CudaRuntime:
        """Find and load the libraries.

        Raises:
            CudaUnavailable: one of them is not on this machine.
        """
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaUnavailable(f"no NVIDIA driver here ({error})") from None
        for name in (*_LIBRARY_NAMES, *_packaged_libraries()):
            with contextlib.suppress(OSError):
                return cls(ctypes.CDLL(name), driver)
        raise CudaUnavailable("no CUDA runtime library (libcudart) here; install CUDA or torch's")

    def num_devices(self) -> int:
        count = _INT(0)
        self._call("cudaGetDeviceCount", ctypes.byref(count))
        return count.value

    def device_uuid(self, device: int) -> str:
        """Such as "8f3a...": 32 hex digits; "" when the driver does not say."""
        if self._driver is None:
            return ""
        number, uuid = _INT(0), ctypes.create_string_buffer(16)
        if (
            self._driver.cuInit(0) != SUCCESS
            or self._driver.cuDeviceGet(ctypes.byref(number), device) != SUCCESS
            or self._driver.cuDeviceGetUuid_v2(uuid, number) != SUCCESS
        ):
            return ""
        return uuid.raw.hex()

    def find_device(self, uuid: str) -> int | None:
        """The device with that uuid, in any of the usual spellings; None when it is not here."""
        wanted = plain_uuid(uuid)
        for device in range(self.num_devices()):
            if self.device_uuid(device) == wanted:
                return device
        return None

    def set_device(self, device: int) -> None:
        """Use `device` in the calling thread from now on."""
        self._call("cudaSetDevice", device)

    def host_register(self, address: int, num_bytes: int) -> None:
        """Pin host memory of this process."""
        self._call("cudaHostRegister", address, num_bytes, HOST_REGISTER_PORTABLE)

    def host_unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def malloc(self, num_bytes: int) -> int:
        pointer = _P()
        self._call("cudaMalloc", ctypes.byref(pointer), num_bytes)
        return pointer.value or 0

    def free(self, pointer: int) -> None:
        self._call("cudaFree", pointer)

    def ipc_get_handle(self, pointer: int) -> bytes:
        """64 bytes that let another process open the allocation that begins at `pointer`."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle)

    def ipc_open_handle(self, handle: bytes) -> int:
        """Map another process's allocation; close it before its owner frees it.

        Raises:
            ValueError: `handle` is not 64 bytes long.
        """
        if len(handle) != IPC_HANDLE_BYTES:
            raise ValueError(f"a CUDA IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        pointer = _P()
        self._call(
            "cudaIpcOpenMemHandle",
            ctypes.byref(pointer),
            IpcHandle.from_buffer_copy(handle),
            IPC_LAZY_ENABLE_PEER_ACCESS,
        )
        return pointer.value or 0

    def ipc_close_handle(self, pointer: int) -> None:
        self._call("cudaIpcCloseMemHandle", pointer)

    def stream_create(self) -> int:
        """A stream that does not wait for the default stream."""
        stream = _P()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), STREAM_NON_BLOCKING)
        return stream.value or 0

    def stream_synchronize(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", stream)

    def stream_destroy(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy. From memory that is not registered it may block until it is staged."""
        self._call("cudaMemcpyAsync", target, source, num_bytes, MEMCPY_HOST_TO_DEVICE, stream)

    def event_create(self) -> int:
        event = _P()
        self._call("cudaEventCreateWithFlags", ctypes.byref(event), EVENT_DISABLE_TIMING)
        return event.value or 0

    def event_record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def is_event_done(self, event: int) -> bool:
        """True when all work before the event's record is done. Not ready is no error."""
        code = self._library.cudaEventQuery(event)
        if code == ERROR_NOT_READY:
            self._library.cudaGetLastError()
            return False
        self._check("cudaEventQuery", code)
        return True

    def event_destroy(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code != SUCCESS:
            self._library.cudaGetLastError()
            text = self._library.cudaGetErrorString(code)
            raise CudaError(name, code, text.decode(errors="replace"))


def plain_uuid(uuid: str) -> str:
    """ "GPU-8F3A...-..." and its other spellings as 32 lower-case hex digits."""
    return uuid.removeprefix("GPU-").replace("-", "").lower()


def _packaged_libraries() -> list[str]:
    """libcudart as torch's own dependencies install it: nvidia/<package>/lib/libcudart.so.N."""
    roots = {Path(sysconfig.get_paths()[key]) for key in ("purelib", "platlib")}
    roots |= {Path(entry) for entry in sys.path if entry.endswith("-packages")}
    return sorted(
        (str(path) for root in roots for path in root.glob("nvidia/*/lib/libcudart.so.*")),
        reverse=True,
    )
