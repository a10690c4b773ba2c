"""Measures one model on shares of one's own device, for `kvmig.placement` (`profile --shares`).

On a GPU a share is what an MPS daemon lets a process have of the SMs
(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE); on a CPU it is a part of the cores that this process may use.
Each share and number of GPUs has a server of its own, of one instance.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import Progress

from kvmig.core.devices import DeviceRecord
from kvmig.core.errors import ConfigError
from kvmig.core.model_sizes import ModelSizes, decode_sizes, sizes_in
from kvmig.launcher.environment import total_memory
from kvmig.placement.step_costs import DeviceCosts, ModelCost, StepCost, load
from kvmig.process.nvml import read_devices
from kvmig_tools.cost_file import with_model
from kvmig_tools.cost_fit import ShareTimes, fit_step_cost
from kvmig_tools.profile_measure import STEPS, Measured, measure
from kvmig_tools.served import Served

USABLE = 0.9
"""Part of the device's memory that placements may use: assumed, as vLLM does."""
CONTEXTS = (32, 256, 1024)
CHECK_S = 300.0
COPIED_BYTES = 256 << 20
COPIES = 10
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


class ProfiledDevice(NamedTuple):
    """What is measured on."""

    name: str
    memory_bytes: int
    gpu: DeviceRecord | None
    """None: this host's CPU."""
    cores: tuple[int, ...]


def own_device(name: str, environment: Mapping[str, str] = os.environ) -> ProfiledDevice:
    """The first GPU that may be used, or the CPU. name: how it is called; empty: its own name."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    devices = read_devices(environment).devices
    if not devices:
        return ProfiledDevice(name or f"cpu-{len(cores)}-cores", total_memory(), None, cores)
    gpu = devices[0]
    return ProfiledDevice(name or gpu.name.lower().replace(" ", "-"), gpu.total, gpu, cores)


def shares_of(text: str, device: ProfiledDevice) -> list[int]:
    """Parse "100,50" into percentages, descending. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= 100 for word in words):
        raise ConfigError(f"--shares is {text!r:.100}, must be percentages of 1 to 100 with commas")
    shares = sorted({int(word) for word in words}, reverse=True)
    if shares[0] != 100 or len(shares) < 2:
        raise ConfigError(
            f"--shares is {text}, must have 100 and one smaller share at least: costs are fitted"
            " over shares"
        )
    if device.gpu is None:
        wrong = [one for one in shares if one * len(device.cores) % 100]
        if wrong:
            allowed = [100 * count // len(device.cores) for count in _whole(len(device.cores))]
            raise ConfigError(
                f"--shares has {wrong[0]}, must be whole cores of the {len(device.cores)} here:"
                f" {', '.join(map(str, allowed)) or 'one core has no shares'}"
            )
    elif not device.gpu.mps:
        raise ConfigError(
            f"--shares is {text}, but no MPS daemon listens, without which a process has no share"
            " of the SMs: start nvidia-cuda-mps-control -d"
        )
    return shares


def _whole(cores: int) -> list[int]:
    """Numbers of cores that are whole percentages."""
    return [count for count in range(1, cores + 1) if 100 * count % cores == 0]


def sizes_of(text: str) -> list[int]:
    """Parse "1,2" into tensor-parallel sizes. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= 16 for word in words):
        raise ConfigError(f"--tp is {text!r:.100}, must be numbers of GPUs of 1 to 16 with commas")
    return sorted({int(word) for word in words})


def points_of(most_sequences: int, cache_tokens: int) -> list[tuple[int, int]]:
    """Batches to measure, as (sequences, tokens of each prompt), that an engine runs at once."""
    return [
        (sequences, prompt)
        for sequences in (1 << power for power in range(7))
        for prompt in CONTEXTS
        if sequences <= most_sequences and sequences * (prompt + 2 * STEPS) <= cache_tokens
    ]


def model_name(args: argparse.Namespace) -> str:
    """What the model is called in the file."""
    return args.name or Path(args.model).name


def profile_shares(
    args: argparse.Namespace, flags: Sequence[str], environment: Mapping[str, str] = os.environ
) -> DeviceCosts:
    """Measure, fit, and add the model to those of the file that is there. Raises KvmigError.

    flags: of the engines, without those for the tensor-parallel size.
    """
    device = own_device(args.device, environment)
    shares, tps = shares_of(args.shares, device), sizes_of(args.tp)
    before = load(str(args.out)) if args.out.exists() else None
    name = model_name(args)
    fitted: dict[str, StepCost] = {}
    own_bytes = 0
    sizes = ModelSizes(weights=0, files=0, tokens=0)
    for tp in tps:
        words = [*flags, *([] if tp == 1 else [f"--tensor-parallel-size={tp}"])]
        sizes = _asked_sizes(args.model, words)
        times: list[ShareTimes] = []
        for share in shares:
            found, own = _measured(args, words, device, share, sizes)
            times.append(ShareTimes(share / 100, found.prompt_medians, found.step_medians))
            own_bytes = max(own_bytes, own)
        fitted[str(tp)] = fit_step_cost(times)
    workers = max(1, sizes.workers)
    cost = ModelCost(sizes.weights * workers, sizes.token * workers, fitted)
    measured = DeviceCosts(
        name=device.name,
        source=f"measured on {time.strftime('%Y-%m-%d')} with shares {args.shares}",
        memory_bytes=device.memory_bytes,
        bandwidth=copied_bytes_a_second("cpu" if device.gpu is None else "cuda"),
        usable=USABLE,
        instance_bytes=own_bytes,
        models={name: cost},
    )
    return with_model(before, measured, name)


def _measured(
    args: argparse.Namespace,
    flags: Sequence[str],
    device: ProfiledDevice,
    share: int,
    sizes: ModelSizes,
) -> tuple[Measured, int]:
    """Times on one share, and bytes of the instance besides weights and KV cache."""
    enter: list[str] = []
    environment: dict[str, str] = {}
    if device.gpu is None:
        count = len(device.cores) * share // 100
        enter = [sys.executable, "-c", ON_CORES, ",".join(map(str, device.cores[:count]))]
    elif share < 100:
        environment = {PERCENTAGE: str(share)}
    used = _used(device)
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        Served(flags, model=args.model, enter=enter, environment=environment) as served,
    ):
        found = asyncio.run(
            measure(
                served.url, 1, args.repeats, progress, f"{share} %",
                points_of(args.max_num_seqs, args.num_gpu_blocks_override * args.block_size),
            )
        )  # fmt: skip
        (row,) = served.get("instances")
        after = _used(device)
    weights = sizes.weights * max(1, sizes.workers)
    if device.gpu is None:
        return found, max(0, row["beside_kv"] - weights)
    cache = row["blocks_total"] * args.block_size * sizes.token
    return found, max(0, after - used - sizes.weights - cache)


ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(',')));"
    " os.execv(sys.argv[2], sys.argv[2:])"
)
"""A Python program that runs a command on some cores: those, then the command."""


def _used(device: ProfiledDevice) -> int:
    """Bytes that are taken of the GPU now; 0 on a CPU."""
    if device.gpu is None:
        return 0
    found = {one.uuid: one.used for one in read_devices().devices}
    return found.get(device.gpu.uuid, 0)


def _asked_sizes(model: str, flags: Sequence[str]) -> ModelSizes:
    """What the engine says of the model's sizes, before it loads anything. Raises ConfigError."""
    command = [sys.executable, "-m", "kvmig.serve", model, *flags, "--check", "--sizes"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)
        sizes = decode_sizes(sizes_in(done.stdout.splitlines()))
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise ConfigError(f"the sizes of {model} are not known: {error}") from error
    if done.returncode or sizes is None:
        why = done.stderr.strip() or "its engine doesn't say them"
        raise ConfigError(f"the sizes of {model} are not known: {why}")
    return sizes


def copied_bytes_a_second(device: str) -> float:
    """The bandwidth of a device's memory: what a plain copy reads and writes. device: torch's."""
    import torch

    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * COPIED_BYTES / (time.perf_counter() - began))
    return best
