"""The port through which a cluster gets its llumlets: processes of this host, or Ray's.

A launcher places, starts and ends; when, how many and how often again is decided by
`kvmig.cli.cluster`. The scheduler and the front ends always run on this host
(`kvmig.cli.children`).
"""

from __future__ import annotations

from typing import Protocol

from kvmig.cli.launch import LlumletLaunch

STOP_S = 5.0
"""Between asking a process to end and ending it."""


class Handle(Protocol):
    """One process that was started. `stop` it in any case, also after it has ended."""

    async def ready(self, timeout_s: float) -> str:
        """Its endpoint, once it serves; to be awaited once.

        Raises StartupError with its own sentence, or with how it ended.
        """
        ...

    async def ended(self) -> str:
        """Wait for its end; how it ended, in words. May be awaited by several at once."""
        ...

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """Ask it to end, wait, then end it and all that it started, and free what it held.

        May be called twice.
        """
        ...


class Launcher(Protocol):
    """Starts llumlets. `open`, then `llumlet` as often as wanted, then `close`."""

    async def open(self) -> None:
        """Check what it needs, and free what killed clusters have left.

        Raises ConfigError or StartupError; nothing is left then.
        """
        ...

    async def llumlet(self, launch: LlumletLaunch, workers: int) -> Handle:
        """Start an instance with so many workers, each on a GPU or a share of the cores.

        launch.instance may be the name of an earlier one that has ended. The launcher may
        change what depends on the place: the addresses to bind to. Raises StartupError
        when there is no place or no process; `Handle.ready` says the rest.
        """
        ...

    def renew(self) -> None:
        """Start llumlets from now on from what is on disk now: kvmig, libraries.

        Raises StartupError.
        """
        ...

    async def close(self) -> None:
        """Free what is left. All handles were stopped before. May be called twice."""
        ...
