"""NVIDIA's NCCL through ctypes: communicators of two ranks that send to each other, and no more.

torch isn't asked: its process groups have a watchdog that ends the process when a peer stalls. A
communicator here doesn't block; every wait has a deadline, and one that passes aborts it, which
also ends the kernel that waits on the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.side_stream import SideStream

LIBRARY = "libnccl.so.2"
LEAST_VERSION = 21800
"""2.18: communicators that don't block, and a limit on their thread blocks."""
MOST_CTAS = 4
"""Thread blocks of one transfer: as few as leave the GPU to the engine's steps."""
ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_BYTES = 1
"""ncclUint8."""
_MAGIC, _UNSET = 0xCAFEBEEF, -(1 << 31)
_POLL_S = 0.0002


class _UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", ctypes.c_ubyte * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.18; later libraries take it with their defaults for the rest."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )


_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        *(POINTER(c_void_p), c_int, _UniqueId, c_int),
        POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclCommAbort": (c_void_p,),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The library: torch's, a wheel's or the system's. Raises KernelUnavailable with the reason."""
    reasons = []
    for place in (LIBRARY, *find_in_wheel()):
        try:
            loaded = ctypes.CDLL(place)
            for name, arguments in _PROTOTYPES.items():
                getattr(loaded, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            reasons.append(str(error))
            continue
        version = c_int()
        _check(loaded, "ncclGetVersion", loaded.ncclGetVersion(byref(version)))
        if version.value < LEAST_VERSION:
            raise KernelUnavailable(f"NCCL {version.value} is too old: 2.18 is needed")
        return loaded
    raise KernelUnavailable(f"NCCL isn't installed (pip install nvidia-nccl-cu13): {reasons[0]}")


def make_unique_id() -> bytes:
    """What both ranks of a new communicator need. Raises KvmigError."""
    made = _UniqueId()
    _check(library(), "ncclGetUniqueId", library().ncclGetUniqueId(byref(made)))
    return bytes(made.internal)


class NcclPair:
    """Rank 0 or 1 of a communicator, on a stream of its own. One thread uses it.

    Raises KvmigError.
    """

    def __init__(self, driver: CudaDriver, unique_id: bytes, rank: int, timeout_s: float) -> None:
        """Waits for the other rank; TimeoutError if it doesn't come."""
        if len(unique_id) != ID_BYTES:
            raise KvmigError(f"{len(unique_id)} bytes aren't an id of NCCL's")
        self._library, self._peer = library(), 1 - rank
        self._communicator = c_void_p()
        driver.enter()
        self._driver = driver
        self._stream: SideStream | None = SideStream(driver)
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_MAGIC,
            version=LEAST_VERSION + 1,
            blocking=0,
            cga_cluster_size=_UNSET,
            min_ctas=_UNSET,
            max_ctas=MOST_CTAS,
            net_name=None,
            split_share=_UNSET,
        )
        try:
            wanted = _UniqueId.from_buffer_copy(unique_id)
            status = self._library.ncclCommInitRankConfig(
                byref(self._communicator), 2, wanted, rank, byref(config)
            )
            self._await("ncclCommInitRankConfig", status, timeout_s)
        except BaseException:
            self.abort()
            raise

    def send(self, address: int, nbytes: int, timeout_s: float) -> None:
        """Send device memory; it has left when this returns. TimeoutError ends the pair."""
        self._transfer("ncclSend", address, nbytes, timeout_s)

    def receive(self, address: int, nbytes: int, timeout_s: float) -> None:
        """The same into device memory. Ranks send and receive in the same order and sizes."""
        self._transfer("ncclRecv", address, nbytes, timeout_s)

    def abort(self) -> None:
        """End the communicator, and what it does on the GPU. Idempotent."""
        communicator, self._communicator = self._communicator, c_void_p()
        if communicator.value:
            self._driver.enter()
            _check(self._library, "ncclCommAbort", self._library.ncclCommAbort(communicator))
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _transfer(self, name: str, address: int, nbytes: int, timeout_s: float) -> None:
        if not self._communicator.value or self._stream is None:
            raise KvmigError("this side has left the communicator")
        self._driver.enter()
        stream = c_void_p(self._stream.handle)
        try:
            function = getattr(self._library, name)
            status = function(address, nbytes, _BYTES, self._peer, self._communicator, stream)
            self._await(name, status, timeout_s)
            self._stream.settle(timeout_s)
        except BaseException:
            self.abort()
            raise

    def _await(self, name: str, status: int, timeout_s: float) -> None:
        """Wait for the end of a call that didn't block."""
        until = time.monotonic() + timeout_s
        while status == _IN_PROGRESS:
            if time.monotonic() > until:
                raise TimeoutError(f"{name} has not ended within {timeout_s:g} s")
            time.sleep(_POLL_S)
            found = c_int()
            asked = self._library.ncclCommGetAsyncError(self._communicator, byref(found))
            status = asked or found.value
        _check(self._library, name, status)


def _check(loaded: ctypes.CDLL, name: str, status: int) -> None:
    if status != _SUCCESS:
        loaded.ncclGetErrorString.restype = c_char_p
        words = loaded.ncclGetErrorString(c_int(status)) or b"unknown error"
        raise KvmigError(f"{name}: {words.decode()} (NCCL error {status})")


def find_in_wheel() -> list[str]:
    """NVIDIA's wheel, whose folder the loader doesn't search."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return [str(Path(folder) / "lib" / LIBRARY) for folder in folders]
