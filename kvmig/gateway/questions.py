"""What a front end asks its instances: to run engine methods, and which requests they hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvmig.controlplane.messages import Call, CallDone, ListRequests, Requests
from kvmig.gateway.calls import Calls
from kvmig.gateway.errors import CallFailed, CallTimeout, InstanceLost
from kvmig.gateway.fleet import Fleet
from kvmig.kvtransfer.wire import Frame

LIST_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class Questions:
    """Asks several instances at once."""

    def __init__(self, calls: Calls, fleet: Fleet) -> None:
        self._calls = calls
        self._fleet = fleet

    async def run(
        self, names: Sequence[str], method: str, payload: Sequence[Frame], timeout_s: float
    ) -> dict[str, list[memoryview]]:
        """See `Router.call`."""

        async def ask(instance: str) -> list[memoryview]:
            def send(call_id: int) -> None:
                self._fleet.send(instance, Call(call_id, method), payload)

            done, result = await self._calls.ask(instance, send, CallDone, timeout_s, method)
            if done.error is not None:
                raise CallFailed(f"{method} failed on instance {instance}: {done.error}")
            return result

        answers = await asyncio.gather(*(ask(name) for name in names))
        return dict(zip(names, answers, strict=True))

    async def requests(self) -> dict[str, Requests]:
        """What each instance that is fit holds; one that doesn't answer, nothing."""

        async def ask(instance: str) -> Requests:
            def send(call_id: int) -> None:
                self._fleet.send(instance, ListRequests(call_id))

            try:
                told, _ = await self._calls.ask(
                    instance, send, Requests, LIST_TIMEOUT_S, "ListRequests"
                )
            except (CallTimeout, InstanceLost) as error:
                log.warning("requests of instance %s are not listed: %s", instance, error)
                return Requests(0, [])
            return told

        names = [name for name in self._fleet.alive if self._fleet.fit(name)]
        return dict(zip(names, await asyncio.gather(*(ask(name) for name in names)), strict=True))
