"""NVIDIA's driver through ctypes: the memory, events and streams that the kernels' callers need.

Neither torch nor CUDA's run-time library is loaded. Everything happens in a device's primary
context, which torch and CuPy use as well, and which stays the calling thread's. Errors of calls
are KvmigError with the driver's words.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p

import numpy as np

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import Ids

LIBRARY = "libcuda.so.1"
NOT_READY = 600
_EVENT_WITH_TIMING, _EVENT_WITHOUT_TIMING = 0, 2
_STREAM_NON_BLOCKING = 1
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
_MULTIPROCESSORS = 16
_PORTABLE, _READ_ONLY = 1, 8  # pinned for every context; the device only reads it


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", c_int),
        ("hints", c_int * 4),
        ("flags", c_uint),
    )


_IN_STREAM_ORDER, _BESIDE_KERNELS = 1, 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class CudaDriver:
    """The calls on one device; from any thread. Raises KernelUnavailable if it can't be used."""

    def __init__(self, device: int = 0) -> None:
        self._library = _initialised()
        self._device, context = c_int(), c_void_p()
        try:
            self._call("cuDeviceGet", byref(self._device), c_int(device))
            self._call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        except KvmigError as error:
            raise KernelUnavailable(f"GPU {device} can't be used: {error}") from error
        self._context = context
        self.ordinal = device

    def enter(self) -> None:
        """Make the device's context the calling thread's; what queues work there needs that."""
        self._call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: object) -> None:
        """A function of the driver's, on this device. Raises KvmigError.

        It never spoils a graph that another thread captures just now, as the engine's does.
        """
        self.enter()
        self.call_outside(name, *arguments)

    def call_outside(self, name: str, *arguments: object) -> None:
        """The same of a function that asks for no context: the calling thread keeps its own, which
        may be another device's."""
        mode = c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", byref(mode))

    @functools.cached_property
    def multiprocessors(self) -> int:
        """SMs."""
        return self.attribute(_MULTIPROCESSORS)

    def attribute(self, number: int) -> int:
        """CUdevice_attribute."""
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(number), self._device)
        return value.value

    def uuid(self) -> str:
        """The device's name among all there are, in hex."""
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", byref(found), self._device)
        return bytes(found).hex()

    def reaches(self, other: int) -> bool:
        """Whether the device can have access to another one's memory."""
        peer, can = c_int(), c_int()
        self._call("cuDeviceGet", byref(peer), c_int(other))
        self._call("cuDeviceCanAccessPeer", byref(can), self._device, peer)
        return bool(can.value)

    # -- memory

    def allocate(self, nbytes: int) -> int:
        """Address of device memory."""
        address = c_void_p()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return int(address.value or 0)

    def free(self, address: int) -> None:
        """Waits for the device."""
        self.call("cuMemFree_v2", c_void_p(address))

    def allocate_pinned(self, nbytes: int) -> int:
        """Address of host memory that the device copies from and to without a stop."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), c_size_t(nbytes), c_uint(_PORTABLE))
        return int(address.value or 0)

    def free_pinned(self, address: int) -> None:
        self.call("cuMemFreeHost", c_void_p(address))

    def pin(self, address: int, nbytes: int, read_only: bool) -> None:
        """The same of host memory that is there already."""
        flags = c_uint(_PORTABLE | (_READ_ONLY if read_only else 0))
        self.call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), flags)

    def unpin(self, address: int) -> None:
        """Undo `pin`; the memory must be there still."""
        self.call("cuMemHostUnregister", c_void_p(address))

    # -- copies

    def upload(self, device: int, pinned: int, nbytes: int, stream: int) -> None:
        """Queue a copy to device memory."""
        self.call("cuMemcpyHtoDAsync_v2", *_copy(device, pinned, nbytes, stream))

    def download(self, pinned: int, device: int, nbytes: int, stream: int) -> None:
        """Queue a copy from device memory."""
        self.call("cuMemcpyDtoHAsync_v2", *_copy(pinned, device, nbytes, stream))

    def move(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy within device memory, a peer's included."""
        self.call("cuMemcpyDtoDAsync_v2", *_copy(to, source, nbytes, stream))

    def write(self, device: int, data: bytes) -> None:
        """Copy to device memory; it is there when this returns."""
        self.call("cuMemcpyHtoD_v2", c_void_p(device), c_char_p(data), c_size_t(len(data)))

    def read(self, device: int, nbytes: int) -> bytes:
        """What is in device memory."""
        data = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", data, c_void_p(device), c_size_t(nbytes))
        return data.raw

    def clear(self, device: int, nbytes: int, stream: int) -> None:
        """Queue zeros."""
        zeros = c_void_p(device), ctypes.c_ubyte(0), c_size_t(nbytes), c_void_p(stream)
        self.call("cuMemsetD8Async", *zeros)

    def copy_blocks(
        self,
        src: Sequence[BlockRegion],
        dst: Sequence[BlockRegion],
        src_ids: Ids,
        dst_ids: Ids,
        stream: int,
    ) -> None:
        """Queue `face.CopyKernels.copy` without checksums on the copy engines, which leave the SMs
        alone.

        `stream` is not the default one. The blocks may also lie in pinned host memory. Raises
        KernelUnavailable below CUDA 12.8.
        """
        runs = np.array([region.run for region in src], np.uint64)
        to, source = _places(dst, dst_ids), _places(src, src_ids)
        kept = runs > 0
        to, source = to[:, kept].ravel(), source[:, kept].ravel()
        sizes = np.tile(runs[kept], len(src_ids))
        if not sizes.size:
            return
        how = CopyAttributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_KERNELS)
        first, failed_at = c_size_t(0), c_size_t(0)
        addresses = (c_void_p(one.ctypes.data) for one in (to, source, sizes))
        attributes = byref(how), byref(first), c_size_t(1), byref(failed_at)
        self.call(
            "cuMemcpyBatchAsync", *addresses, c_size_t(sizes.size), *attributes, c_void_p(stream)
        )

    # -- events and streams

    def new_event(self, timed: bool = False) -> int:
        """timed: for `elapsed_ms`, which makes it dearer."""
        event = c_void_p()
        flags = _EVENT_WITH_TIMING if timed else _EVENT_WITHOUT_TIMING
        self.call("cuEventCreate", byref(event), c_uint(flags))
        return int(event.value or 0)

    def record(self, event: int, stream: int) -> None:
        """The event happens when the stream has done what is queued now."""
        self.call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def happened(self, event: int) -> bool:
        """Raises KvmigError if the device failed meanwhile."""
        try:
            self.call("cuEventQuery", c_void_p(event))
        except CudaError as error:
            if error.status == NOT_READY:
                return False
            raise
        return True

    def elapsed_ms(self, first: int, last: int) -> float:
        """Milliseconds from one event to another by the device's clock. Both are timed and have
        happened, else it raises KvmigError."""
        ms = c_float()
        self.call("cuEventElapsedTime", byref(ms), c_void_p(first), c_void_p(last))
        return ms.value

    def destroy_event(self, event: int) -> None:
        self.call("cuEventDestroy_v2", c_void_p(event))

    def stream_priorities(self) -> tuple[int, int]:
        """(lowest, highest): a lower number is a higher priority."""
        lowest, highest = c_int(), c_int()
        self.call("cuCtxGetStreamPriorityRange", byref(lowest), byref(highest))
        return lowest.value, highest.value

    def new_stream(self, priority: int = 0) -> int:
        """A stream that doesn't wait for the default one."""
        stream = c_void_p()
        flags = c_uint(_STREAM_NON_BLOCKING)
        self.call("cuStreamCreateWithPriority", byref(stream), flags, c_int(priority))
        return int(stream.value or 0)

    def settle(self) -> None:
        """Wait for all that is queued on the device, by whomever in this process."""
        self.call("cuCtxSynchronize")

    def finish(self, stream: int) -> None:
        """Wait for all that is queued on it."""
        self.call("cuStreamSynchronize", c_void_p(stream))

    def wait(self, stream: int, event: int) -> None:
        """What is queued on the stream from now on comes after the event, as it is now; one that
        was never recorded holds nothing up."""
        self.call("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(0))

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", c_void_p(stream))

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise KernelUnavailable(f"NVIDIA's driver is too old: it has no {name}") from None
        if status := function(*arguments):
            raise CudaError(status, f"{name}: {_words(self._library, status)}")


class CudaError(KvmigError):
    """A call that failed: CUresult in `status`."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def version() -> int:
    """CUDA's version that the driver is for, as 13000 for 13.0. Raises KernelUnavailable."""
    found = c_int()
    library = _initialised()
    if status := library.cuDriverGetVersion(byref(found)):
        raise KernelUnavailable(f"no version of the driver: {_words(library, status)}")
    return found.value


def current_device() -> int:
    """The device of the calling thread's context; 0 if it has none. Raises KernelUnavailable."""
    library, device = _initialised(), c_int()
    return 0 if library.cuCtxGetDevice(byref(device)) else device.value


@functools.cache
def _initialised() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise KernelUnavailable(f"no NVIDIA driver: {error}") from error
    if status := library.cuInit(c_uint(0)):
        raise KernelUnavailable(f"no NVIDIA GPU can be used: {_words(library, status)}")
    return library


def _words(library: ctypes.CDLL, status: int) -> str:
    text = c_char_p()
    library.cuGetErrorString(c_int(status), byref(text))
    return f"{(text.value or b'unknown error').decode()} (CUDA error {status})"


def _copy(to: int, source: int, nbytes: int, stream: int) -> tuple[object, ...]:
    return c_void_p(to), c_void_p(source), c_size_t(nbytes), c_void_p(stream)


def _places(regions: Sequence[BlockRegion], ids: Ids) -> Ids:
    """Addresses of the runs [n, regions]."""
    bases = np.array([region.base for region in regions], np.int64)
    strides = np.array([region.block_stride for region in regions], np.int64)
    return bases + ids[:, None] * strides
