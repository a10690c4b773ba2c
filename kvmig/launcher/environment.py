"""What the launcher takes from its machine and environment: secrets, its port, open files;
and what each instance gets of it: threads and memory, or a GPU."""

from __future__ import annotations

import os
import resource
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache
from pathlib import Path

from kvmig.core.config import SPARE_FILES
from kvmig.core.errors import ConfigError
from kvmig.core.read_progress import note_path
from kvmig.core.secret import SECRET
from kvmig.engines.registry import kind_of
from kvmig.engines.weight_bytes import local_folder, weight_bytes
from kvmig.process import cgroups
from kvmig.process.nvml import read_devices
from kvmig.rpc.zmq_sockets import LEAST_BYTES

GIB = 1 << 30
CPU_KV_SHARE = 0.4
"""Share of the available memory for all instances' KV caches together, unless a flag says
otherwise."""
CPU_KV_MOST = 4 * GIB
CPU_KV_LEAST = 64 << 20
INSTANCE_OVERHEAD = GIB
"""What a CPU instance takes without weights and KV cache: Python, torch, vLLM (measured 0.8
GiB)."""
GPU_SHARE = 0.9
"""vLLM's default of --gpu-memory-utilization, shared by the instances of one GPU."""
GPU_FREE_SHARE = "0.01"
"""vLLM starts only where this part of a GPU is free, which others of a unit may have. Where its
cache's size is given, it means nothing else."""


# -- the launcher's own


def cluster_secret(environment: MutableMapping[str, str]) -> bytes:
    """Take the user's out of the environment, so that no child inherits it, or make one.

    Children get secrets on their stdin (`process.child`): neither flags nor environment have
    them. Raises ConfigError if the user's is too short.
    """
    given = environment.pop(SECRET, "").encode()
    if given and len(given) < LEAST_BYTES:
        raise ConfigError(
            f"{SECRET} has {len(given)} bytes, must have {LEAST_BYTES} or more, or be left out"
        )
    return given or secrets.token_bytes(32)


def too_few_files(allowed: int, max_waiting: int, front_ends: int) -> str:
    """The reason why they aren't enough for the clients that may wait; empty if they are."""
    needed = -(-max_waiting // front_ends) + SPARE_FILES
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return ""
    return (
        f"only {allowed} open files are allowed (ulimit -Hn), --max-waiting {max_waiting} may take"
        f" {needed}: connections beyond that are closed; raise the one or lower the other"
    )


# -- each instance's part


def gpus() -> list[str]:
    """Ids of the GPUs that may be used, empty on a CPU machine."""
    return [one.id for one in read_devices(os.environ).devices]


def available_memory() -> int:
    """Bytes that can be taken without swapping. Raises ConfigError."""
    available, left = _memory("MemAvailable"), cgroups.memory_left()
    return available if left is None else min(available, left)


def total_memory() -> int:
    """Bytes of this machine, or of this container. Raises ConfigError."""
    total, limit = _memory("MemTotal"), cgroups.memory_limit()
    return total if limit is None else min(total, limit)


def part_of_memory(share: float) -> int:
    """Bytes of an instance that may take `share` (0 to 1) of this machine. Raises ConfigError."""
    return min(available_memory(), int(total_memory() * share))


def _memory(field: str) -> int:
    with Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise ConfigError(f"/proc/meminfo names no {field}; set --kv-cache-memory-bytes")


def weights_of(model: str, dtype: str = "auto", revision: str | None = None) -> int:
    """Bytes of a model's weights as an engine holds them; 0: it is unknown on this host.

    dtype, revision: the engine's flags.
    """
    folder = local_folder(model, revision)
    if folder is None:
        return 0
    patterns = "*.safetensors", "*.bin", "*.pt", "*.index.json"
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    return _weights_by_headers(str(folder), dtype, tuple(map(_seen, files)))


def _seen(file: Path) -> tuple[str, int, int]:
    """What changes of a file with its content."""
    note_path(file)
    found = file.stat()
    return file.name, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=1024)
def _weights_by_headers(folder: str, dtype: str, _files: tuple[tuple[str, int, int], ...]) -> int:
    """Read again only when a file has changed."""
    return weight_bytes(folder, dtype)


def cores() -> int:
    """Cores whose time this process gets."""
    own, quota = len(os.sched_getaffinity(0)), cgroups.cores()
    return own if quota is None else min(own, quota)


def worker_threads(workers: Sequence[int], among: int | None = None) -> int:
    """OpenMP threads of each worker on a CPU.

    workers: of each instance that is planned. among: cores; None: this process's.
    """
    return max(1, (among or cores()) // sum(workers))


def llumlet_environment(
    engine: str, gpu_ids: Sequence[str], threads: int, base: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a llumlet's process, with what its engine needs on a CPU."""
    environment = instance_environment(gpu_ids, threads, base)
    if not gpu_ids:
        environment |= kind_of(engine).on_cpu(environment)
    return environment


def instance_environment(
    gpu_ids: Sequence[str], threads: int, base: Mapping[str, str]
) -> dict[str, str]:
    """The environment of an instance; what the user has set stays.

    gpu_ids: its own, one per worker; none on a CPU. threads: of each worker there.
    """
    environment = dict(base)
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # NumPy's BLAS, which no engine computes with, starts a thread a core when it is imported: a
    # process that has some can't be forked.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    if gpu_ids:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        # The ids count as nvidia-smi does, whatever order the user has set; CUDA's is by speed.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        return environment
    # Workers share the cores; vLLM's own binding would put all of them on the same ones.
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def memory_flags(
    argv: Sequence[str],
    kv_bytes: int | None,
    workers: Sequence[int],
    gpu_count: int,
    available: int,
    environment: Mapping[str, str],
    weights: int,
    arena: int = 0,
) -> list[str]:
    """vLLM flags that share the machine's memory among instances; none that the user has given.

    |                    | --gpu-memory-utilization  | --kv-cache-memory-bytes     |
    |--------------------|---------------------------|-----------------------------|
    | on GPUs            | part of a GPU, if shared, | -                           |
    |                    | unless a size is given    |                             |
    | on GPUs, in units  | GPU_FREE_SHARE            | the arena                   |
    | on a CPU           | -                         | part of the memory,         |
    |                    |                           | unless a share is given     |
    | on a CPU, in units | -                         | the arena                   |

    A number of blocks (--num-gpu-blocks-override) says nothing about memory: with it alone vLLM
    still wants its whole share free.

    kv_bytes: --kv-cache-memory-bytes, if given: a worker's; workers: of each instance;
    weights: bytes of the model on disk. arena: KV cache that instances share with others, which
    is no part of theirs; 0: they don't. Raises ConfigError if there isn't enough.
    """
    share_given = any(word.split("=")[0] == "--gpu-memory-utilization" for word in argv)
    if gpu_count:
        per_gpu = -(-sum(workers) // gpu_count)
        return _gpu_flags(per_gpu, arena, share_given, size_given=kv_bytes is not None)
    given = kv_bytes
    if given is None and (space := environment.get("VLLM_CPU_KVCACHE_SPACE", "")).isdecimal():
        given = int(space) * GIB
    if arena:
        _check_fixed(workers, weights, available)
        return [] if given is not None else _size_flag(arena)
    if given is not None:
        # The engine knows what a given size holds.
        _check_memory(workers, weights, available, given, least=0)
        return []
    if share_given:
        return []
    fixed = sum(fixed_memory(count, weights) for count in workers)
    part = min(CPU_KV_MOST, int((available - fixed) * CPU_KV_SHARE / sum(workers)))
    _check_memory(workers, weights, available, part, least=CPU_KV_LEAST)
    return _size_flag(part)


def _gpu_flags(per_gpu: int, arena: int, share_given: bool, *, size_given: bool) -> list[str]:
    """per_gpu: workers on each GPU."""
    if arena:
        share = [] if share_given else _share_flag(GPU_FREE_SHARE)
        return share if size_given else [*share, *_size_flag(arena)]
    if share_given or size_given or per_gpu == 1:
        return []
    return _share_flag(f"{GPU_SHARE / per_gpu:.3f}")


def _share_flag(share: str) -> list[str]:
    return ["--gpu-memory-utilization", share]


def _size_flag(kv_bytes: int) -> list[str]:
    return ["--kv-cache-memory-bytes", str(kv_bytes)]


def _check_fixed(workers: Sequence[int], weights: int, available: int) -> None:
    """Whether instances fit, whose KV cache is no part of this. Raises ConfigError."""
    fixed = [fixed_memory(count, weights) for count in workers]
    if sum(fixed) > available:
        raise ConfigError(
            f"not enough memory for {len(workers)} instances: each needs"
            f" {max(fixed) / GIB:.1f} GiB besides KV cache and {max(0, available) / GIB:.1f} GiB"
            " are available without what the unit may lease, lower --instances"
        )


def _check_memory(
    workers: Sequence[int], weights: int, available: int, kv_bytes: int, *, least: int
) -> None:
    """Whether instances fit. kv_bytes: of a worker, which must have `least`. Raises ConfigError."""
    fixed = [fixed_memory(count, weights) for count in workers]
    if kv_bytes < least or sum(fixed) + sum(workers) * kv_bytes > available:
        need = max(fixed) + max(workers) * max(kv_bytes, least)
        raise ConfigError(
            f"not enough memory for {len(workers)} instances: each needs {need / GIB:.1f} GiB and "
            f"{available / GIB:.1f} GiB are available, lower --instances or "
            "--kv-cache-memory-bytes"
        )


def fixed_memory(workers: int, weights: int, rest: int = INSTANCE_OVERHEAD) -> int:
    """Bytes of an instance on a CPU without its KV cache. rest: of each of its processes."""
    return processes_of(workers) * rest + weights


def processes_of(workers: int) -> int:
    """Processes of one instance: a single worker is the instance's own process."""
    return workers if workers == 1 else workers + 1
