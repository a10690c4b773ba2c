"""A rolling restart: instances start again one after the other, each once it is drained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvmig.cli.instance import Deadline, Instance
from kvmig.controlplane.messages import OrderRefused


class Rolling:
    """At most one at a time; it stops at the first instance that doesn't serve again."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raises OrderRefused if one is under way."""
        if self._task is not None and not self._task.done():
            raise OrderRefused("conflict", "a rolling restart is under way")

    def begin(self, instances: Sequence[Instance], deadline: Deadline) -> None:
        """deadline: of each drain. Raises OrderRefused."""
        self.check()
        if idle := [one.name for one in instances if one.state != "serving"]:
            raise OrderRefused("conflict", f"instance {idle[0]} doesn't serve")
        first, *others = instances
        renewed = first.restart(deadline)
        self._task = asyncio.create_task(self._run(first, renewed, others, deadline))

    async def close(self) -> None:
        """Stop; the one that is being drained stays as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(
        self,
        instance: Instance,
        renewed: asyncio.Future[str],
        others: Sequence[Instance],
        deadline: Deadline,
    ) -> None:
        for following in (*others, None):
            if failed := await renewed:  # it may take as long as a drain and a start
                self._say(f"rolling restart: stopped at instance {instance.name} ({failed})")
                return
            if following is None:
                break
            instance = following
            try:
                renewed = instance.restart(deadline)
            except OrderRefused as refused:
                self._say(f"rolling restart: stopped ({refused})")
                return
        self._say("rolling restart: done")
