"""Which engines are installed, and whether kvmig knows their versions. Nothing is loaded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from kvmig.engines.transformers.versions import SUPPORTED as TRANSFORMERS
from kvmig.engines.vllm.kind import PACKAGES
from kvmig.engines.vllm.kind import SUPPORTED as VLLM


class EngineVersion(NamedTuple):
    """One engine's package."""

    package: str
    installed: str
    supported: tuple[str, ...]
    """Beginnings of versions."""


def engine_versions() -> list[EngineVersion]:
    """The engines that are installed."""
    found = []
    for package, supported in (
        *((name, VLLM) for name in PACKAGES),
        ("transformers", TRANSFORMERS),
    ):
        if installed := installed_version(package):
            found.append(EngineVersion(package, installed, supported))
    return found


def installed_version(package: str) -> str:
    """The version of a package; empty: it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
