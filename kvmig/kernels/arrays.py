"""Arrays of any library as address, size and device: buffers, DLPack, CUDA array interface.

Torch tensors, CuPy arrays, NumPy arrays, bytes, shared memory: none of these libraries is
imported here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvmig.kernels.api import Device

Buffer = bytes | bytearray | memoryview

_DEVICES: dict[int, Device] = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}
"""DLDeviceType: kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged."""


@dataclass(frozen=True, slots=True)
class ArrayMemory:
    """A contiguous array's bytes. Keep the array alive as long as they are used."""

    address: int
    nbytes: int
    device: Device


def memory_of(array: Any) -> ArrayMemory:
    """The memory of a contiguous array.

    Raises ValueError for arrays with gaps or of other devices, and TypeError for anything that
    is no array.
    """
    if hasattr(array, "__dlpack_device__") and not isinstance(array, np.ndarray):
        return _dlpack(array)
    if (interface := getattr(array, "__cuda_array_interface__", None)) is not None:
        return _cuda(interface)
    if isinstance(array, memoryview) and _of_a_gpu(array):
        return ArrayMemory(_address(array), array.nbytes, "cuda")
    try:
        view = memoryview(array)
    except TypeError:
        raise TypeError(
            f"{type(array).__name__} is no array: it has neither DLPack nor a buffer"
        ) from None
    if not view.c_contiguous:
        raise ValueError(f"an array of shape {view.shape} is not contiguous")
    return ArrayMemory(address_of(view), view.nbytes, "cpu")


def address_of(buffer: Buffer) -> int:
    """The address of a contiguous buffer, read-only ones too. Keep the buffer alive.

    Raises ValueError for a view of a GPU's memory, which the host can't use.
    """
    if isinstance(buffer, memoryview) and _of_a_gpu(buffer):
        raise ValueError(f"a buffer of {buffer.nbytes} bytes is a GPU's memory, not the host's")
    return _address(buffer)


def _address(buffer: Buffer) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def _of_a_gpu(view: memoryview) -> bool:
    """Whether what it is a view of is marked so (`kvmig.kernels.ipc.view`)."""
    return hasattr(view.obj, "__cuda_array_interface__")


def _cuda(interface: dict[str, Any]) -> ArrayMemory:
    """Version 3 of the CUDA array interface."""
    shape, itemsize = tuple(interface["shape"]), np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    if strides is not None:
        _contiguous(shape, tuple(stride // itemsize for stride in strides))
    return ArrayMemory(interface["data"][0], _count(shape) * itemsize, "cuda")


class _DLTensor(ctypes.Structure):
    """dlpack.h, the same in every version so far."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _dlpack(array: Any) -> ArrayMemory:
    kind = int(array.__dlpack_device__()[0])
    if kind not in _DEVICES:
        raise ValueError(f"an array of DLPack device type {kind} is neither the host's nor CUDA's")
    device = _DEVICES[kind]
    # -1: no wait for the producer's stream; only the address is wanted.
    capsule = array.__dlpack__(stream=-1) if device == "cuda" else array.__dlpack__()
    # The capsule keeps its name, so that its own destructor frees it.
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        _contiguous(shape, tuple(tensor.strides[: tensor.ndim]))
    nbytes = _count(shape) * tensor.bits * tensor.lanes // 8
    return ArrayMemory((tensor.data or 0) + tensor.byte_offset, nbytes, device)


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer.restype = ctypes.c_void_p


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raises ValueError unless the elements are one run in C order."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected and _count(shape):
            raise ValueError(f"an array of shape {shape} and strides {strides} is not contiguous")
        expected *= size
