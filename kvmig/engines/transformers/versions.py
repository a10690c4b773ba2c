"""Which versions of transformers the adapter supports, and whether one of them is installed."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from kvmig.core.errors import StartupError

SUPPORTED = ("5.19.",)
"""Version prefixes. Continuous batching's internals move with every minor release."""
PACKAGES = ("transformers", "torch", "jinja2", "psutil")
"""Packages of the extra `transformers`."""


def check_version() -> str:
    """Return the installed version; StartupError names the supported ones otherwise."""
    supported = ", ".join(prefix + "x" for prefix in SUPPORTED)
    for package in PACKAGES:
        if find_spec(package) is None:
            raise StartupError(
                f'{package} is not installed: pip install "kvmig[transformers]"'
                f" (kvmig needs transformers {supported}), or choose another --engine"
            )
    installed = version("transformers")
    if not installed.startswith(SUPPORTED):
        raise StartupError(
            f"transformers {installed} is not supported; kvmig needs transformers {supported}"
        )
    return installed
