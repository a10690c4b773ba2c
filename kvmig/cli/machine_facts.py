"""Measures what `kvmig doctor` judges. Nothing is changed, and no engine is loaded."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import os
import re
import resource
import shutil
import socket
import sys
import time
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

import kvmig
from kvmig.cli.client import holder_of
from kvmig.cli.machine_verdicts import DatabaseFact, EngineFact, GpuFact, MachineFacts
from kvmig.core.devices import DeviceRecord
from kvmig.core.shown_urls import shown_url
from kvmig.fleet.database_url import parse_database_url
from kvmig.launcher.engine_versions import engine_versions, installed_version
from kvmig.launcher.environment import cores, total_memory
from kvmig.process.nvml import DRIVER, read_devices

SHM = "/dev/shm"  # noqa: S108 - the place of POSIX's shared memory
CONNECT_S = 3
TIME_ERROR = 5
"""What adjtimex(2) returns while the clock follows no other one."""
TIMEX_BYTES = 512
"""More than struct timex has on any machine."""


def measure(address: tuple[str, int], data: str, database: str) -> MachineFacts:
    """The facts of this machine. address: where a fleet would listen; data: its folder.

    database: its URL; empty: it is a file of that folder. Raises ConfigError.
    """
    devices = read_devices()
    driver, driver_cuda = _driver()
    torch, torch_cuda = _torch()
    shm, disk = shutil.disk_usage(SHM), _disk_free(data)
    error = _address_error(*address)
    taken = error == os.strerror(errno.EADDRINUSE)
    return MachineFacts(
        python=sys.version_info[:2],
        has_nvidia_files=DRIVER.exists(),
        gpus=tuple(map(_gpu, devices.devices)),
        gpus_missing=devices.missing if devices.devices or DRIVER.exists() else "",
        driver=driver,
        driver_cuda=driver_cuda,
        torch=torch,
        torch_cuda=torch_cuda,
        engines=tuple(EngineFact(*one) for one in engine_versions()),
        ray=installed_version("ray"),
        files=_limit(resource.RLIMIT_NOFILE),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        shm=shm.total,
        shm_free=shm.free,
        address=address,
        address_error=error,
        fleet=holder_of(Path(data, "run")) if taken else "",
        data=data,
        disk_free=disk if isinstance(disk, int) else 0,
        disk_error=disk if isinstance(disk, str) else "",
        memory=total_memory(),
        physical_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cores=cores(),
        physical_cores=os.cpu_count() or 1,
        synchronized=_synchronized(),
        database=_database(database) if database else None,
        kernels=Path(kvmig.__file__).with_name("kernels").joinpath("_lib/libkvmig_cpu.so").exists(),
    )


def _gpu(one: DeviceRecord) -> GpuFact:
    return GpuFact(
        one.name, one.total, one.mps, str(one), sum(process.computes for process in one.processes)
    )


def _driver() -> tuple[str, tuple[int, int] | None]:
    """Version of NVIDIA's driver, and the newest CUDA that it runs; nothing where there is none."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except (ImportError, OSError):
        return "", None
    except nvml.NVMLError:
        return "", None
    try:
        number = int(nvml.nvmlSystemGetCudaDriverVersion())
        return str(nvml.nvmlSystemGetDriverVersion()), (number // 1000, number % 1000 // 10)
    except nvml.NVMLError:
        return "", None
    finally:
        nvml.nvmlShutdown()


def _torch() -> tuple[str, tuple[int, int] | None]:
    """torch's version, and the CUDA that it is built for; torch itself is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return "", None
    file = Path(found.submodule_search_locations[0], "version.py")
    try:
        content = file.read_text()
    except OSError:
        return installed_version("torch"), None
    cuda = re.search(r"^cuda[^=\n]*= *'(\d+)\.(\d+)", content, re.MULTILINE)
    return installed_version("torch"), (int(cuda[1]), int(cuda[2])) if cuda else None


def _limit(which: int) -> int | None:
    _, hard = resource.getrlimit(which)
    return None if hard == resource.RLIM_INFINITY else hard


def _address_error(host: str, port: int) -> str:
    """Why the address can't be listened on; empty: it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _disk_free(data: str) -> int | str:
    """Bytes that are free for a folder that need not be there yet; or why it can't be used."""
    folder = Path(data)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} can't be written to"
    return shutil.disk_usage(folder).free


def _synchronized() -> bool | None:
    libc = ctypes.CDLL(None, use_errno=True)
    adjtimex = getattr(libc, "adjtimex", None)
    state = -1 if adjtimex is None else int(adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)))
    return None if state < 0 else state != TIME_ERROR


def _database(url: str) -> DatabaseFact | None:
    """What PostgreSQL answers; None for a file, which a fleet checks itself. Raises ConfigError."""
    made = parse_database_url(url, "--database")
    if made.drivername == "sqlite":
        return None
    shown = shown_url(made.render_as_string())
    try:
        engine = create_engine(
            made, poolclass=NullPool, connect_args={"connect_timeout": CONNECT_S}
        )
        with engine.connect() as connection:
            began = time.time()
            now = connection.execute(text("select extract(epoch from clock_timestamp())"))
            theirs = float(now.scalar_one())
            ours = (began + time.time()) / 2
            number = connection.execute(text("show server_version_num")).scalar_one()
    except ImportError as error:
        return DatabaseFact(shown, f"{error}; pip install 'kvmig[postgres]'")
    except SQLAlchemyError as error:
        lines = str(getattr(error, "orig", None) or error).strip().splitlines()
        return DatabaseFact(shown, shown_url(lines[0]) if lines else type(error).__name__)
    return DatabaseFact(shown, version=int(number), skew_s=theirs - ours)
