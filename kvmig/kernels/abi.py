"""The C ABI of csrc/kvmig.h in ctypes: structures, prototypes, versions and errors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import Device

ABI_VERSION = 4
"""KVMIG_ABI_VERSION of the header that these declarations were written for."""

OK, BAD_ARGUMENT, UNSUPPORTED, CUDA_ERROR = 0, 1, 2, 1000


class CRegion(ctypes.Structure):
    """kvmig_region."""

    _fields_ = (("base", c_void_p), ("block_stride", c_int64), ("run", c_int64))


_COPY = (*(c_void_p, c_void_p, c_int64), *(c_void_p, c_void_p, c_int64))
_QUEUE = (c_void_p, c_int32)
PROTOTYPES: dict[str, tuple[type, ...]] = {
    "kvmig_copy": (*_COPY, c_void_p, *_QUEUE),
    "kvmig_copy_tma": (*_COPY, c_void_p, *_QUEUE),
    "kvmig_checksum": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, *_QUEUE),
}
"""Arguments of every function that returns a status."""
_FREE = (c_void_p, c_void_p, c_void_p)
CPU_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "kvmig_heads_take": (*_FREE, c_int64, c_void_p),
    "kvmig_heads_give": (*_FREE, c_int64, c_void_p, c_int64),
    "kvmig_heads_rows": (
        *(c_void_p, c_int64, c_int64, c_int64),
        *(c_void_p, c_int64, c_int64, c_int64, c_void_p),
    ),
}
"""Prototypes of csrc/heads.h, which only the CPU's library has."""


def load(path: Path, device: Device) -> ctypes.CDLL:
    """The library at `path`, declared. Raises KernelUnavailable if it isn't one for `device`."""
    try:
        library = ctypes.CDLL(str(path))
        version = library.kvmig_abi_version()
        if version != ABI_VERSION:
            raise KernelUnavailable(f"{path} has ABI version {version}, not {ABI_VERSION}")
        library.kvmig_backend.restype = ctypes.c_char_p
        found = library.kvmig_backend().decode()
        if found != device:
            raise KernelUnavailable(f"{path} is for {found}, not for {device}")
        cpu_only = CPU_PROTOTYPES if device == "cpu" else {}
        for name, arguments in (PROTOTYPES | cpu_only).items():
            getattr(library, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"can't load {path}: {error}") from error
    return library


def check(status: int) -> None:
    """Turn a status into an exception: ValueError, KernelUnavailable or KvmigError."""
    if status == OK:
        return
    if status == BAD_ARGUMENT:
        raise ValueError("the kernel library refused its arguments")
    if status == UNSUPPORTED:
        raise KernelUnavailable("the kernel library can't do this on this device")
    raise KvmigError(f"CUDA error {status - CUDA_ERROR} in the kernel library")


def region_table(regions: Sequence[BlockRegion]) -> ctypes.Array[CRegion]:
    """[n_regions] in host memory."""
    return (CRegion * len(regions))(*(CRegion(r.base, r.block_stride, r.run) for r in regions))
