"""Memory by its address, as buffers: host memory of a library's, or a GPU's."""

from __future__ import annotations

import ctypes


def view(address: int, nbytes: int, owner: object) -> memoryview:
    """`nbytes` at `address`, writable; keeps `owner`, whose memory it is, alive.

    Of a GPU's memory only the address means something: kernels take it, host code that
    reads or writes the view crashes.
    """
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
