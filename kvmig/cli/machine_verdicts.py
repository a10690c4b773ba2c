"""What `kvmig doctor` makes of a machine's facts: a line for each, with what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from kvmig.core.devices import TAKE_TURNS
from kvmig.core.quantities import size_text

Level = Literal["ok", "warn", "fail"]

GIB = 1 << 30
LEAST_FILES, USUAL_FILES = 4096, 65_536
LEAST_SHM, USUAL_SHM = 256 << 20, GIB
LEAST_DISK, USUAL_DISK = GIB, 20 * GIB
LEAST_MEMORY = 4 * GIB
MOST_SKEW_S = 2.0
"""The longest difference of two clocks before keys and leases expire at the wrong time."""


class MachineVerdict(msgspec.Struct, frozen=True):
    """One line."""

    name: str
    level: Level
    said: str
    """What is there, and what to do about it."""


class EngineFact(NamedTuple):
    """An installed engine."""

    package: str
    version: str
    supported: tuple[str, ...]
    """Beginnings of versions."""


class GpuFact(NamedTuple):
    """One GPU."""

    name: str
    total: int
    mps: bool
    title: str = ""
    """Index, name and UUID of the GPU."""
    computing: int = 0
    """Processes that compute on it now."""


class DatabaseFact(NamedTuple):
    """What a database answered."""

    shown: str
    """The URL without its password."""
    error: str = ""
    version: int = 0
    """PostgreSQL's, as its `server_version_num`."""
    skew_s: float = 0.0
    """How far its clock is ahead of this one's."""


class MachineFacts(NamedTuple):
    """What was measured."""

    python: tuple[int, int]
    has_nvidia_files: bool = False
    gpus: tuple[GpuFact, ...] = ()
    gpus_missing: str = ""
    """Why GPUs are left out."""
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    torch: str = ""
    torch_cuda: tuple[int, int] | None = None
    """The CUDA that torch is built for; None: it is a CPU build."""
    engines: tuple[EngineFact, ...] = ()
    ray: str = ""
    files: int | None = None
    """Open files that may be allowed; None: there is no limit."""
    locked: int | None = None
    """Bytes that may be locked in memory; None: there is no limit."""
    shm: int = 0
    shm_free: int = 0
    address: tuple[str, int] = ("127.0.0.1", 8080)
    address_error: str = ""
    """Why it can't be listened on; empty: it can."""
    fleet: str = ""
    """The process id of the fleet of `data`, where the address is taken; empty: none serves."""
    data: str = ""
    disk_free: int = 0
    disk_error: str = ""
    memory: int = 0
    """Bytes of this machine, or of its control groups."""
    physical_memory: int = 0
    cores: int = 1
    physical_cores: int = 1
    synchronized: bool | None = None
    """Whether the kernel's clock follows another one; None: the kernel doesn't say."""
    database: DatabaseFact | None = None
    kernels: bool = True
    """Whether kvmig's own library of copies is built."""


def verdicts(facts: MachineFacts) -> list[MachineVerdict]:
    """A line for each, in the order in which they are to be mended."""
    return [
        _python(facts),
        *_gpus(facts),
        *_versions(facts),
        _files(facts),
        _shm(facts),
        _memory(facts),
        _cores(facts),
        _port(facts),
        _disk(facts),
        _clock(facts),
        *_database(facts),
        *_small_things(facts),
    ]


def exit_status(found: Sequence[MachineVerdict]) -> int:
    """0: kvmig can serve here; 1: something must be mended first."""
    return int(any(one.level == "fail" for one in found))


def _python(facts: MachineFacts) -> MachineVerdict:
    said = ".".join(map(str, facts.python))
    if not (3, 11) <= facts.python <= (3, 14):
        return MachineVerdict("python", "fail", f"{said}: kvmig needs Python 3.11 to 3.14")
    return MachineVerdict("python", "ok", said)


def _gpus(facts: MachineFacts) -> Iterator[MachineVerdict]:
    if not facts.gpus:
        if facts.has_nvidia_files or facts.driver:
            why = facts.gpus_missing or "CUDA_VISIBLE_DEVICES leaves none"
            said = (
                f"NVIDIA's driver is there, but no GPU can be used: {why}; see nvidia-smi,"
                " and in a container whether it was started with --gpus all"
            )
            yield MachineVerdict("gpu", "fail", said)
        else:
            yield MachineVerdict("gpu", "ok", "none: engines run on the CPU")
        return
    names = ", ".join(f"{one.name} ({size_text(one.total)})" for one in facts.gpus)
    if facts.gpus_missing:
        said = f"{names}; left out: {facts.gpus_missing}; see nvidia-smi"
        yield MachineVerdict("gpu", "warn", said)
    else:
        yield MachineVerdict("gpu", "ok", names)
    cuda = "" if facts.driver_cuda is None else f", for CUDA up to {_dotted(facts.driver_cuda)}"
    yield MachineVerdict("driver", "ok", f"{facts.driver or 'unknown'}{cuda}")
    if any(one.mps for one in facts.gpus):
        yield MachineVerdict("mps", "ok", "its daemon listens: instances compute at the same time")
    else:
        said = (
            "no daemon: instances on one GPU take turns; if several are to share one, start"
            " kvmig.serve with --mps, or nvidia-cuda-mps-control -d before a fleet"
        )
        yield MachineVerdict("mps", "ok", said)
    for one in facts.gpus:
        if one.computing > 1 and not one.mps:
            yield MachineVerdict("mps", "warn", f"{one.title}: {TAKE_TURNS}")


def _versions(facts: MachineFacts) -> Iterator[MachineVerdict]:
    if not facts.torch:
        said = "not installed: no real engine can run; pip install 'kvmig[vllm]'"
        yield MachineVerdict("torch", "warn", said)
    elif facts.torch_cuda is None and facts.gpus:
        said = f"{facts.torch} is a CPU build, and there are GPUs: install torch for CUDA"
        yield MachineVerdict("torch", "fail", said)
    elif facts.torch_cuda is not None and not facts.gpus:
        said = (
            f"{facts.torch} is built for CUDA {_dotted(facts.torch_cuda)}, and there is no GPU:"
            " make setup installs the CPU builds"
        )
        yield MachineVerdict("torch", "warn", said)
    elif _too_new(facts.torch_cuda, facts.driver_cuda):
        assert facts.torch_cuda is not None
        assert facts.driver_cuda is not None
        said = (
            f"{facts.torch} is built for CUDA {_dotted(facts.torch_cuda)}, the driver"
            f" {facts.driver} runs up to {_dotted(facts.driver_cuda)}: install a newer driver, or"
            " torch for that CUDA"
        )
        yield MachineVerdict("torch", "fail", said)
    else:
        built = "the CPU" if facts.torch_cuda is None else f"CUDA {_dotted(facts.torch_cuda)}"
        yield MachineVerdict("torch", "ok", f"{facts.torch}, for {built}")
    for engine in facts.engines:
        known = ", ".join(f"{one}x" for one in engine.supported)
        if engine.version.startswith(engine.supported):
            yield MachineVerdict(engine.package, "ok", engine.version)
        else:
            said = f"{engine.version} is not supported: install {known}"
            yield MachineVerdict(engine.package, "fail", said)
    if not facts.engines:
        said = "no engine is installed: pip install 'kvmig[vllm]' or 'kvmig[transformers]'"
        yield MachineVerdict("engine", "warn", said)
    if facts.ray:
        said = f"{facts.ray}: all nodes of a cluster need this version"
        yield MachineVerdict("ray", "ok", said)


def _too_new(built: tuple[int, int] | None, runs: tuple[int, int] | None) -> bool:
    """A driver runs all minor versions of its major one."""
    return built is not None and runs is not None and built[0] > runs[0]


def _files(facts: MachineFacts) -> MachineVerdict:
    if facts.files is None or facts.files >= USUAL_FILES:
        allowed = "no limit" if facts.files is None else str(facts.files)
        return MachineVerdict("open files", "ok", allowed)
    level: Level = "fail" if facts.files < LEAST_FILES else "warn"
    said = (
        f"{facts.files} (ulimit -Hn), a client takes one or two: allow {USUAL_FILES} by"
        " LimitNOFILE=, /etc/security/limits.conf or docker's --ulimit nofile="
    )
    return MachineVerdict("open files", level, said)


def _shm(facts: MachineFacts) -> MachineVerdict:
    total, free = size_text(facts.shm), size_text(facts.shm_free)
    if facts.shm_free >= USUAL_SHM:
        return MachineVerdict("shm", "ok", f"{free} of {total} are free")
    level: Level = "fail" if facts.shm_free < LEAST_SHM else "warn"
    said = (
        f"{free} of {total} are free in /dev/shm, through which requests move: give a container"
        " --shm-size=2g (in Kubernetes an emptyDir of medium Memory), or remove what is left there"
    )
    return MachineVerdict("shm", level, said)


def _memory(facts: MachineFacts) -> MachineVerdict:
    said = size_text(facts.memory)
    if facts.memory < facts.physical_memory:
        said += f" by its control group, of {size_text(facts.physical_memory)}"
    if facts.memory < LEAST_MEMORY:
        said += f": an engine needs {size_text(LEAST_MEMORY)} or more; raise the limit"
        return MachineVerdict("memory", "warn", said)
    return MachineVerdict("memory", "ok", said)


def _cores(facts: MachineFacts) -> MachineVerdict:
    said = str(facts.cores)
    if facts.cores < facts.physical_cores:
        said += f" of {facts.physical_cores}, by a quota or an affinity"
    if facts.cores < 2:
        said += ": the proxy and the engines wait for each other; give it two or more"
        return MachineVerdict("cores", "warn", said)
    return MachineVerdict("cores", "ok", said)


def _port(facts: MachineFacts) -> MachineVerdict:
    host, port = facts.address
    if not facts.address_error:
        return MachineVerdict("port", "ok", f"{host}:{port} is free")
    if facts.fleet:
        said = (
            f"{host}:{port} is taken, and the fleet of {facts.data} serves (process {facts.fleet}):"
            " another fleet needs a --port and a --data of its own"
        )
        return MachineVerdict("port", "warn", said)
    said = f"{host}:{port} can't be listened on ({facts.address_error}): choose --port or --host"
    return MachineVerdict("port", "fail", said)


def _disk(facts: MachineFacts) -> MachineVerdict:
    if facts.disk_error:
        said = f"{facts.data} can't be used ({facts.disk_error}): choose another --data"
        return MachineVerdict("disk", "fail", said)
    said = f"{size_text(facts.disk_free)} are free for {facts.data}"
    if facts.disk_free >= USUAL_DISK:
        return MachineVerdict("disk", "ok", said)
    level: Level = "fail" if facts.disk_free < LEAST_DISK else "warn"
    return MachineVerdict("disk", level, f"{said}: models' files need more; choose another --data")


def _clock(facts: MachineFacts) -> MachineVerdict:
    if facts.synchronized is None:
        said = "unknown: make sure that it is synchronized"
        return MachineVerdict("clock", "ok", said)
    if facts.synchronized:
        return MachineVerdict("clock", "ok", "synchronized")
    said = "not synchronized: start chrony or systemd-timesyncd, else keys expire at a wrong time"
    return MachineVerdict("clock", "warn", said)


def _database(facts: MachineFacts) -> Iterator[MachineVerdict]:
    found = facts.database
    if found is None:
        return
    if found.error:
        said = f"{found.shown} can't be used: {found.error}"
        yield MachineVerdict("database", "fail", said)
        return
    yield MachineVerdict("database", "ok", f"{found.shown}, PostgreSQL {found.version // 10_000}")
    if abs(found.skew_s) > MOST_SKEW_S:
        way = "ahead of" if found.skew_s > 0 else "behind"
        said = (
            f"the database's is {abs(found.skew_s):.0f} s {way} this one: synchronize both,"
            " else two hosts may take each other for dead"
        )
        yield MachineVerdict("clock", "fail", said)


def _small_things(facts: MachineFacts) -> Iterator[MachineVerdict]:
    if not facts.kernels:
        said = "kvmig's own are not built, torch's are slower: install g++, then kvmig again"
        yield MachineVerdict("copies", "warn", said)
    if facts.locked is not None and facts.gpus and facts.locked < GIB:
        said = (
            f"{size_text(facts.locked)} may be locked (ulimit -l): RDMA between hosts (nixl) needs"
            " more, by LimitMEMLOCK=infinity or docker's --ulimit memlock=-1"
        )
        yield MachineVerdict("locked memory", "warn", said)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
