"""The GPUs of this host as the server sees them, looked at again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvmig.core.devices import DeviceInventory, DeviceRecord, in_gib
from kvmig.core.errors import StartupError
from kvmig.fleet.device_room import DeviceMemory
from kvmig.process.child import say
from kvmig.process.descendants import descendants, parents
from kvmig.process.nvml import missing_devices, read_devices

LOOK_S = 2.0
"""Pause between two looks."""
LOOK_TIMEOUT_S = 30.0
"""A driver that answers later than this is said to hang; the last answer counts on."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceSample:
    """One look: what there is, and the parents of all processes then."""

    inventory: DeviceInventory = field(default_factory=DeviceInventory)
    parents: Mapping[int, int] = field(default_factory=dict)

    def used_by(self, uuid: str, pids: Iterable[int]) -> int:
        """Bytes of a GPU that these processes and those below them have, as far as is known; 0: of
        one that was not seen at this look, such as of a worker that is away."""
        own = descendants(pids, self.parents)
        found = (one.processes for one in self.inventory.devices if one.uuid == uuid)
        return sum(one.used or 0 for one in next(found, ()) if one.pid in own)


class DeviceWatch:
    """Looks at the GPUs again and again: `read_sample` once, then `run` it as a task."""

    def __init__(
        self,
        supervisor: Path | None = None,
        read: Callable[[], DeviceInventory] = read_devices,
        *,
        elsewhere: bool = False,
    ) -> None:
        """supervisor: file with its process id; all of the fleet are below that process.

        elsewhere: whether the GPUs are those of other hosts, which may get some at any time."""
        self.sample = DeviceSample()
        self._supervisor = supervisor
        self._read = read
        self._looking: asyncio.Task[None] | None = None
        self.elsewhere = elsewhere

    @property
    def inventory(self) -> DeviceInventory:
        """The GPUs, as they were at the last look."""
        return self.sample.inventory

    def read_sample(self) -> None:
        """Look now; takes some milliseconds, and seconds where a driver starts for it."""
        inventory = self._read()
        # Only who has GPUs pays for a look at all processes.
        here = inventory.devices and not self.elsewhere
        self.sample = DeviceSample(inventory, parents() if here else {})

    async def look_first(self) -> None:
        """Look, and print what there is. Raises StartupError where the driver hangs."""
        try:
            await self._look_on_thread()
        except TimeoutError as error:
            raise StartupError(
                f"the GPUs' driver doesn't answer within {LOOK_TIMEOUT_S:g} s"
            ) from error
        for one in self.inventory.devices:
            say(f"{one}: {one.total} bytes, {one.free} are free")
        if missing := missing_devices(self.inventory):
            say(missing)

    async def run(self) -> None:
        """Look every LOOK_S, until cancelled. A host without GPUs is not looked at again."""
        while self.inventory.devices or self.elsewhere:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look_on_thread()
            except (TimeoutError, OSError) as error:
                log.warning("the GPUs are not looked at now: %r", error)

    async def _look_on_thread(self) -> None:
        """Look, or wait for the look that hangs: it keeps one thread, not one more each time.
        Raises TimeoutError, OSError."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(asyncio.to_thread(self.read_sample))
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            await asyncio.shield(self._looking)

    def memory(
        self, claims: Mapping[str, Mapping[str, int]], taken: Mapping[str, int]
    ) -> tuple[DeviceMemory, ...]:
        """The memory of each GPU. claims: bytes of each model by UUID.

        taken: bytes that instances that serve have claimed by UUID; this is what they use where
        the driver names none of their processes.
        """
        own = self._own()
        return tuple(
            DeviceMemory(
                id=one.uuid,
                title=title_of(one),
                total=one.total,
                others=(others := _others(one, own, taken.get(one.uuid, 0))),
                whose=_whose(one, own, others),
                claims=claims.get(one.uuid, {}),
                peers=frozenset(one.peers),
            )
            for one in self.inventory.devices
        )

    def _own(self) -> set[int]:
        """Processes of the fleet."""
        if self._supervisor is None or not self.sample.parents:
            return set()
        try:
            return descendants([int(self._supervisor.read_text())], self.sample.parents)
        except (OSError, ValueError) as error:
            log.warning("%s has no process id: %s", self._supervisor, error)
            return set()


def title_of(device: DeviceRecord) -> str:
    """What people call it: `GPU 0 (NVIDIA H100, GPU-8f...)`."""
    return str(device)


def _others(device: DeviceRecord, own: set[int], taken: int) -> int:
    named = any(one.pid in own and one.used is not None for one in device.processes)
    return device.used_by_others(own) if named else max(0, device.used - taken)


def _whose(device: DeviceRecord, own: set[int], others: int) -> str:
    if not others:
        return ""
    return device.whose(own) or f"{in_gib(others)} are of other processes"
