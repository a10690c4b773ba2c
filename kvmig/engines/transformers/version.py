"""Which transformers versions the adapter was written against, checked before anything starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvmig.ground.errors import StartupError

SUPPORTED = ("5.19.",)
"""Version prefixes. Continuous batching's internals move with every minor release."""


def check_version() -> str:
    """Return the installed version; StartupError names the supported ones otherwise."""
    supported = ", ".join(prefix + "x" for prefix in SUPPORTED)
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        raise StartupError(
            f"transformers is not installed; kvmig needs transformers {supported}"
        ) from None
    if not installed.startswith(SUPPORTED):
        raise StartupError(
            f"transformers {installed} is not supported; kvmig needs transformers {supported}"
        )
    return installed
