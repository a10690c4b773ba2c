"""Memory that two processes on this host share: of the GPU through CUDA IPC, or of the host."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any

from kvmig.kernels import ipc
from kvmig.kernels.driver import Driver
from kvmig.kernels.face import Device

Name = ipc.IpcHandle | str
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
    """cudaMalloc's memory. `base`: where it is mapped, which is the address for its owner."""

    base: int
    address: int
    driver: Driver
    owned: bool

    @property
    def name(self) -> Name:
        return ipc.export_ipc(self.address)

    def close(self) -> None:
        self.driver.enter()
        if self.owned:
            self.driver.free(self.base)
        else:
            ipc.close_ipc(self.base)


Staging = HostStaging | CudaStaging


def create(device: Device, nbytes: int) -> Staging:
    """Raises KvmigError."""
    if device == "cpu":
        return HostStaging(shared_memory.SharedMemory(create=True, size=nbytes), owned=True)
    driver = Driver()
    base = driver.allocate(nbytes)
    return CudaStaging(base, base, driver, owned=True)


def open_named(name: Name) -> Staging:
    """The other process's. Raises KvmigError."""
    if isinstance(name, str):
        return HostStaging(shared_memory.SharedMemory(name=name), owned=False)
    driver = Driver()
    driver.enter()
    base = ipc.import_ipc(name)
    return CudaStaging(base, base + name.offset, driver, owned=False)
