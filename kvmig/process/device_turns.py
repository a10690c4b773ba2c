"""Starts on one GPU one after the other, on the whole host: an engine that measures how much memory
it can have must be the only one whose memory changes meanwhile.

A turn is a lock on a file a device, which also the launchers of other models take. The kernel gives
it back when its holder ends, however that ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Collection
from pathlib import Path

from kvmig.core.errors import StartupError
from kvmig.core.own_folder import own_folder

LOOK_S = 0.1
"""Pause between two attempts to get a turn."""


class DeviceTurn:
    """The turn on some devices, until `end`, which may be called twice."""

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors

    def share(self) -> None:
        """Let others start at the same time that don't measure either."""
        for one in self._descriptors:
            fcntl.flock(one, fcntl.LOCK_SH)

    def end(self) -> None:
        """Let the next one begin."""
        while self._descriptors:
            os.close(self._descriptors.pop())


async def take_turn(
    uuids: Collection[str],
    timeout_s: float,
    *,
    alone: Callable[[], bool],
    folder: Path | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> DeviceTurn:
    """Wait for the turn on all these devices.

    alone: whether no other start may run there meanwhile; if not, only those that measure may not.
    It is asked again at each attempt: another start may have measured for this one, too. on_wait:
    called once where it isn't free at once. Raises StartupError after `timeout_s`.
    """
    turn = DeviceTurn(descriptors := [])
    waited = False
    try:
        where = folder or own_folder()
        async with asyncio.timeout(timeout_s):
            for uuid in sorted(uuids):  # in one order for all, or two could wait for each other
                path = where / f"gpu-{uuid}"
                descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                while not _locked(descriptors[-1], alone=alone()):
                    if not waited:
                        waited = True
                        on_wait()
                    await asyncio.sleep(LOOK_S)
    except TimeoutError:
        turn.end()
        raise StartupError(
            f"another start on GPU {', '.join(sorted(uuids))} has taken more than {timeout_s:g} s"
        ) from None
    except OSError as error:
        turn.end()
        raise StartupError(f"no turn on a GPU: {error}") from error
    except BaseException:
        turn.end()
        raise
    return turn


def _locked(descriptor: int, *, alone: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
