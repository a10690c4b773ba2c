"""Which server's wishes a node of a Ray cluster takes: of none earlier than it has seen.

Each server of a fleet has agents of its own. Those of one node remember the highest token together,
in a file, so that it outlives an agent, and so that the agent of a server that stands still lets go
of the node as soon as another server leads.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvmig.core.errors import KvmigError
from kvmig.core.open_files import lacks_descriptor
from kvmig.core.order_fence import NO_TOKEN, OrderFence, OrderToken

WIDTH = 40
"""Characters of a token in its file: a longer one replaces a shorter one in one write."""


class FenceUnknown(KvmigError):
    """No file descriptor is free to see which server leads: nothing on the node changes."""


class NodeFence:
    """What all agents of a node remember. Its methods may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        """folder: of the node, which is there."""
        self._folder = folder

    def refuse(self, fleet: str, token: OrderToken) -> str:
        """Remember the token of a fleet's wish; return why the wish is refused, empty if it isn't.

        fleet: the word of the fleet, the same for all of its servers. Raises FenceUnknown where
        this process has no file descriptor free to look.
        """
        if token == NO_TOKEN:  # of a server that has not said anything yet
            return "no server has sent a token yet"
        path = self._folder / f"{fleet}.token"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                written = os.pread(descriptor, WIDTH, 0).decode("ascii").strip()
                fence = OrderFence(OrderToken.parse(written) if written else NO_TOKEN)
                why = fence.refuse(token)
                if not why and str(token) != written:
                    os.pwrite(descriptor, f"{token!s:<{WIDTH}}".encode(), 0)
                return why
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            if lacks_descriptor(error):
                raise FenceUnknown(f"{path} can't be opened now: {error}") from error
            return f"the highest token of a server is not known: {path} can't be used: {error}"
