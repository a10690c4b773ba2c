"""What starts llumlets: the port that the launcher uses, and what each llumlet must know.

A launcher places, starts and ends llumlets, on this host or on the nodes of a Ray cluster; when,
how many and how often again is decided by `kvmig.launcher.cluster`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvmig.core.config import ClusterConfig
from kvmig.core.secret import SecretStruct
from kvmig.process.supervisor import ProcessHandle


class LlumletLaunch(SecretStruct, frozen=True, kw_only=True):
    """Everything that a llumlet must know to start (JSON; the secret in base64)."""

    cluster: str
    """Names this cluster's shared memory."""
    instance: str
    secret: bytes
    config: ClusterConfig
    engine_argv: list[str]
    """MODEL and the engine's flags."""
    own_flags: tuple[str, ...] = ()
    """The flags that not all instances have."""
    engine_tree: str = ""
    """Folder whose build of the engine goes before the installed one; empty: none does."""
    gpus: tuple[str, ...] = ()
    """Ids of its GPUs; none: the launcher chooses."""
    unit: str = ""
    """Name of where it is in a placement, for people and planners only."""
    node: str = ""
    """Id of the Ray node that it runs on; empty: Ray chooses."""
    whose: str = ""
    """Model and address of its server, for its title."""

    where: str = ""
    """The GPUs and their host, for its title; empty: it runs on a CPU."""

    @property
    def title(self) -> str:
        """What `ps` shows behind the module's name: one of several clusters on a host is known."""
        of = f" of {self.whose}" if self.whose else ""
        return f"{self.instance}{of}{f' on {self.where}' if self.where else ''}"


class PlannedInstance(NamedTuple):
    """One that is to be started."""

    name: str
    workers: int
    words: Sequence[str]
    """MODEL and the engine's flags."""
    unit: str = ""
    """The instance's unit in a placement."""


class LlumletLauncher(Protocol):
    """Starts llumlets. `open`, then `llumlet` as often as wanted, then `close`."""

    async def open(self) -> None:
        """Check what it needs, and free what killed clusters have left.

        Raises ConfigError or StartupError; nothing is left then.
        """
        ...

    async def llumlet(self, launch: LlumletLaunch, workers: int) -> ProcessHandle:
        """Start an instance with this many workers, each on a GPU or a share of the cores.

        launch.instance may be the name of an earlier one that has ended. The launcher may
        change what depends on the place: the addresses to bind to. Raises StartupError
        when there is no place or no process; `ProcessHandle.ready` says the rest.
        """
        ...

    def check_room(self, instances: Sequence[PlannedInstance], gpus: Sequence[str]) -> None:
        """Refuse instances that have no room next to those that are there.

        gpus: of each of them; none: any. Raises ConfigError for GPUs that they can't be given,
        StartupError where there is too little memory.
        """
        ...

    def renew(self, tree: str) -> None:
        """Start llumlets from now on from what is on disk now: kvmig, libraries.

        tree: of the engine that most of them will be (`LlumletLaunch`). Raises StartupError.
        """
        ...

    async def renewed(self) -> None:
        """Wait until the next llumlet needs not wait for what `renew` began.

        What fails of that fails when a llumlet is started.
        """
        ...

    async def close(self) -> None:
        """Free what is left. All handles were stopped before. May be called twice."""
        ...
