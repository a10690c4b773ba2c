"""kvmig moves running LLM requests between engine instances while they decode.

For stacks that embed it: `Migrator` and `SyncMigrator` move requests between engines of one's
own; `Llumlet` is one engine with its sockets. They are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmig.controlplane.llumlet import Llumlet
    from kvmig.migrator import Migrator, SyncMigrator

__version__ = "0.1.0"
__all__ = ["Llumlet", "Migrator", "SyncMigrator", "__version__"]

_HOMES = {
    "Llumlet": "kvmig.controlplane.llumlet",
    "Migrator": "kvmig.migrator",
    "SyncMigrator": "kvmig.migrator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvmig' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
