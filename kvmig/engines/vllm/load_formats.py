"""Which of vLLM's --load-formats reads a model's weights fastest on this machine.

A record has what was measured. It holds until the model's files, vLLM, a loader's package or the
device change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from kvmig.engines.vllm.loaders import FOR_GPUS, PACKAGES

USUAL = "auto"
MEASURED = (USUAL, "runai_streamer", "fastsafetensors")
"""The formats that read safetensors as they are; the first is vLLM's own."""
FROM_SERVERS = {"modelexpress": "it takes weights from ModelExpress's servers, not from files"}
"""Formats that are never chosen by measuring, and why."""
GAIN = 0.05
"""A format must be faster than vLLM's own by this part of its time: less is chance."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one model."""

    model: str
    """The folder, for people."""
    device: str
    at: float
    """Unix time."""
    bytes: int
    """Size of the files with weights."""
    seconds: dict[str, float]
    """Time of each format that was measured."""
    failures: dict[str, str]
    """Why a format could not be measured, by its name."""
    chosen: str

    @property
    def lines(self) -> list[str]:
        """What people may want to know."""
        found = [
            f"--load-format {name}: {took:.2f} s for {self.bytes / 1e9:.2f} GB"
            for name, took in self.seconds.items()
        ]
        found += [
            f"--load-format {name}: not measured: {why}" for name, why in self.failures.items()
        ]
        return [*found, f"--load-format {self.chosen} is used"]


def fastest(seconds: Mapping[str, float]) -> str:
    """The format to use."""
    least = min(seconds, key=lambda name: seconds[name], default=USUAL)
    usual = seconds.get(USUAL)
    if usual is not None and seconds[least] > (1 - GAIN) * usual:
        return USUAL
    return least


def to_measure(device: str) -> tuple[list[str], dict[str, str]]:
    """The formats that can be measured, and why the others can't. device: cpu, or a GPU's name."""
    there: list[str] = []
    missing = {
        name: f"{why}; --load-format {name} chooses it"
        for name, why in FROM_SERVERS.items()
        if find_spec(PACKAGES[name]) is not None
    }
    for name in MEASURED:
        package = PACKAGES.get(name, "")
        if package and find_spec(package.replace("-", "_")) is None:
            missing[name] = f"the package {package} is not installed"
        elif name in FOR_GPUS and device == "cpu":
            missing[name] = "it needs a GPU"
        else:
            there.append(name)
    return there, missing


def weight_files(folder: Path) -> list[Path]:
    """The files with weights that vLLM reads: of one kind."""
    found = (sorted(folder.glob(pattern)) for pattern in WEIGHTS)
    return next((files for files in found if files), [])


def record_name(files: Sequence[Path], engine: str, device: str) -> str:
    """The name of a record: it has all that decides how fast files are read."""
    seen = [(str(one.resolve()), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    packages = [(name, _version(package)) for name, package in sorted(PACKAGES.items())]
    whole = msgspec.json.encode((seen, engine, packages, device))
    return f"{hashlib.blake2b(whole, digest_size=12).hexdigest()}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
