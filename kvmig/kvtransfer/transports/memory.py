"""Memory by its address, as buffers: host memory of a library's, or a GPU's."""

from __future__ import annotations

import ctypes

from kvmig.kernels.face import Device


def view(address: int, nbytes: int, owner: object, device: Device = "cpu") -> memoryview:
    """`nbytes` at `address`, writable; keeps `owner`, whose memory it is, alive.

    Of a GPU's memory only the address means something: kernels take it, host code that
    reads or writes the view crashes. It and its parts say so to `kernels.arrays.memory_of`.
    """
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    if device == "cuda":
        array.__cuda_array_interface__ = {  # type: ignore[attr-defined]
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
    return memoryview(array).cast("B")
