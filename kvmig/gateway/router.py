"""The heart of the front end: which instance runs a request, and whose tokens its client gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvmig.gateway.ports import Decode, Sink
from kvmig.ground.clock import Clock, monotonic
from kvmig.ground.config import ClusterConfig
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.wire import Frame


class Router:
    """Engine-agnostic. Make, use and close it inside one running event loop.

    `block_tokens` (tokens a KV block) is set by whoever read it from the engine's
    description, before the first `submit`.
    """

    block_tokens: int = 16
    reports: deque[MigrationReport]
    """The last 1000 migrations, whoever asked for them, oldest first."""

    def __init__(
        self,
        name: str,
        secret: bytes,
        config: ClusterConfig,
        sink: Sink,
        decode: Decode,
        *,
        clock: Clock = monotonic,
        lost_after_s: float = 10.0,
    ) -> None: ...

    async def add_instance(self, instance: str, endpoint: str, timeout_s: float = 30.0) -> bytes:
        """Connect; returns the engine's description (`Welcome.engine`).

        Its engine index is the number of instances added before. Raises InstanceLost.
        """
        raise NotImplementedError

    async def remove_instance(self, instance: str) -> None:
        """Disconnect; requests that it still runs fail. Unknown ones are ignored."""

    async def close(self) -> None:
        """Disconnect from all; nothing is delivered any more."""

    async def submit(
        self,
        request_id: str,
        external_id: str,
        prompt_tokens: int,
        priority: int,
        payload: Sequence[Frame],
    ) -> str:
        """Send a new request to the instance that the policy picks, and return its id.

        The payload is kept as long as the request lives. Raises NoInstance.
        """
        raise NotImplementedError

    async def abort(self, request_ids: Sequence[str]) -> None:
        """These are not wanted any more. Unknown ids are ignored."""

    async def call(
        self,
        method: str,
        payload: Sequence[Frame] = (),
        instances: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> dict[str, list[memoryview]]:
        """Run an engine method on `instances` (default: all that are connected), at once.

        Raises CallFailed, CallTimeout, InstanceLost, UnknownInstance.
        """
        raise NotImplementedError

    async def migrate(
        self, request_id: str, destination: str, timeout_s: float = 120.0
    ) -> MigrationReport:
        """Move a request, named by its own id or its call's, and wait for the report.

        Raises what `kvmig.gateway.errors` names when it can't start.
        """
        raise NotImplementedError
