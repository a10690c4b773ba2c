"""Secrets: names of variables, and structs of which logs show the type only."""

from __future__ import annotations

from typing import Any

import msgspec

SECRET = "KVMIG_SECRET"
"""Environment variable: the secret that only the processes of a cluster know."""
ADMIN_KEY = "KVMIG_ADMIN_KEY"
"""Environment variable: the admin API's own key. (Any user can read a process's flags.)"""


class SecretStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of documents with secrets that processes get."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Tracebacks with local variables show no more."""
        return []
