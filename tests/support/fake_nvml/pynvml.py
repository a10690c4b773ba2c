"""In the place of nvidia-ml-py, for processes whose path has this folder before it: what it says is
that of `tests.support.fake_devices`. The names and arguments are nvidia-ml-py's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE = 0, 1
NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_CAPS_INDEX_NVLINK = 1, 2
NVML_P2P_STATUS_OK, NVML_P2P_STATUS_NOT_SUPPORTED = 0, 5
nvmlMemory_v2 = 0x02000028


class NVMLError(Exception):
    """What NVML refuses."""


class NVMLLibraryMismatchError(Exception):
    """The driver's library is older than a function."""


class NVMLError_NotSupported(NVMLError):
    def __str__(self) -> str:
        return "Not Supported"


class NVMLError_FunctionNotFound(NVMLError):
    def __str__(self) -> str:
        return "Function Not Found"


class NVMLError_NoPermission(NVMLError):
    def __str__(self) -> str:
        return "Insufficient Permissions"


class NVMLError_InvalidArgument(NVMLError):
    def __str__(self) -> str:
        return "Invalid Argument"


class NVMLError_NotFound(NVMLError):
    def __str__(self) -> str:
        return "Not Found"


class NVMLError_GpuIsLost(NVMLError):
    def __str__(self) -> str:
        return "GPU is lost"


class NVMLError_LibraryNotFound(NVMLError):
    def __str__(self) -> str:
        return "NVML Shared Library Not Found"


class NVMLError_Uninitialized(NVMLError):
    def __str__(self) -> str:
        return "Uninitialized"


_open = 0


def nvmlInit() -> None:
    global _open
    _machine()
    _open += 1


def nvmlShutdown() -> None:
    global _open
    if not _open:
        raise NVMLError_Uninitialized
    _open -= 1


def nvmlDeviceGetCount() -> int:
    return len(_machine())


def nvmlDeviceGetHandleByIndex(index: int) -> Any:
    if not _open:
        raise NVMLError_Uninitialized
    found = _machine()[index]
    if found["lost"]:
        raise NVMLError_GpuIsLost
    return found


def nvmlDeviceGetUUID(handle: Any) -> str:
    return str(handle["uuid"])


def nvmlDeviceGetName(handle: Any) -> str:
    return str(handle.get("name", "a part of it"))


def nvmlDeviceGetCudaComputeCapability(handle: Any) -> tuple[int, int]:
    major, minor = handle["capability"]
    return major, minor


def nvmlDeviceGetMigMode(handle: Any) -> tuple[int, int]:
    if handle["old"]:
        raise NVMLError_NotSupported
    mode = NVML_DEVICE_MIG_ENABLE if handle["parts"] else NVML_DEVICE_MIG_DISABLE
    return mode, mode


def nvmlDeviceGetMaxMigDeviceCount(handle: Any) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle: Any, index: int) -> Any:
    if index >= len(handle["parts"]):
        raise NVMLError_NotFound
    return handle["parts"][index]


def nvmlDeviceGetMemoryInfo(handle: Any, version: int | None = None) -> Any:
    reserved = handle.get("reserved", 0)
    used = sum(_held(handle["uuid"]).values())
    used += sum(one["used"] or 0 for one in handle["processes"])
    total = handle["total"]
    if version is None:
        return SimpleNamespace(total=total, free=total - reserved - used, used=used + reserved)
    if handle.get("old"):
        raise NVMLError_FunctionNotFound
    free = total - reserved - used
    return SimpleNamespace(total=total, free=free, used=used, reserved=reserved, version=version)


def nvmlDeviceGetComputeRunningProcesses(handle: Any) -> list[Any]:
    own = [_process(pid, used) for pid, used in _held(handle["uuid"]).items()]
    others = [one for one in handle["processes"] if not (one["drawing"] or one["mps"])]
    return own + [_process(one["pid"], one["used"]) for one in others]


def nvmlDeviceGetGraphicsRunningProcesses(handle: Any) -> list[Any]:
    return [_process(one["pid"], one["used"]) for one in handle["processes"] if one["drawing"]]


def nvmlDeviceGetMPSComputeRunningProcesses(handle: Any) -> list[Any]:
    if handle.get("old"):
        raise NVMLError_FunctionNotFound
    return [_process(one["pid"], one["used"]) for one in handle["processes"] if one["mps"]]


def nvmlDeviceGetUtilizationRates(handle: Any) -> Any:
    if handle.get("old") or handle.get("busy") is None:
        raise NVMLError_NotSupported
    return SimpleNamespace(gpu=handle["busy"], memory=0)


def nvmlDeviceGetPowerUsage(handle: Any) -> int:
    if handle.get("old") or handle.get("milliwatts") is None:
        raise NVMLError_NotSupported
    return int(handle["milliwatts"])


def nvmlDeviceGetP2PStatus(device1: Any, device2: Any, p2pIndex: int) -> int:
    reached = "nvlinks" if p2pIndex == NVML_P2P_CAPS_INDEX_NVLINK else "peers"
    if device2["uuid"] in device1[reached]:
        return NVML_P2P_STATUS_OK
    return NVML_P2P_STATUS_NOT_SUPPORTED


def _process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def _folder() -> Path:
    return Path(os.environ["KVMIG_FAKE_NVML"])


def _machine() -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads((_folder() / "machine.json").read_text())
    except (KeyError, FileNotFoundError) as error:
        raise NVMLError_LibraryNotFound from error
    return found


def _held(uuid: str) -> dict[int, int]:
    """Bytes of each process that is there: those of one that has ended are free again."""
    found = {}
    for file in _folder().glob(f"* {uuid}"):
        pid = int(file.name.split()[0])
        if Path(f"/proc/{pid}").exists() and (nbytes := int(file.read_text())):
            found[pid] = nbytes
    return found
