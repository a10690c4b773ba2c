"""Memory that two processes on this host share: of the GPU through CUDA IPC, or of the host."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from multiprocessing import shared_memory
from multiprocessing.reduction import DupFd
from typing import Any

from kvmig.kernels import ipc
from kvmig.kernels.api import Device
from kvmig.kernels.driver import CudaDriver


@dataclass(frozen=True, slots=True)
class CudaName:
    """A descriptor on its way to the other process."""

    descriptor: Any
    size: int


Name = CudaName | str
"""What the other process opens it by."""


@dataclass(frozen=True, slots=True)
class HostStaging:
    """Shared memory of the host, made or opened."""

    memory: shared_memory.SharedMemory
    owned: bool

    @property
    def address(self) -> int:
        # A view that was kept would keep the memory from being closed.
        view: Any = self.memory.buf
        return ctypes.addressof((ctypes.c_char * self.memory.size).from_buffer(view))

    @property
    def name(self) -> Name:
        return self.memory.name

    def close(self) -> None:
        self.memory.close()
        if self.owned:
            self.memory.unlink()


@dataclass(frozen=True, slots=True)
class CudaStaging:
    """Memory of the GPU's, made or mapped."""

    mapping: ipc.DeviceMapping
    driver: CudaDriver
    name: Name

    @property
    def address(self) -> int:
        return self.mapping.address

    def close(self) -> None:
        ipc.close(self.driver, self.mapping)


Staging = HostStaging | CudaStaging


def create(device: Device, nbytes: int) -> Staging:
    """Raises KvmigError."""
    if device == "cpu":
        return HostStaging(shared_memory.SharedMemory(create=True, size=nbytes), owned=True)
    driver = CudaDriver()
    mapping, descriptor = ipc.create(driver, nbytes)
    try:
        return CudaStaging(mapping, driver, CudaName(DupFd(descriptor), mapping.size))
    finally:
        os.close(descriptor)


def open_named(name: Name) -> Staging:
    """The other process's. Raises KvmigError."""
    if isinstance(name, str):
        return HostStaging(shared_memory.SharedMemory(name=name), owned=False)
    driver, descriptor = CudaDriver(), name.descriptor.detach()
    try:
        return CudaStaging(ipc.open_descriptor(driver, descriptor, name.size), driver, name)
    finally:
        os.close(descriptor)
