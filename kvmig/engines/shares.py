"""The SMs that an engine's steps take on a GPU, by `--unit-shares`.

Two streams, for steps with prompts and for steps of decodes alone, each keep to a part of the GPU's
SMs (`kvmig.kernels.green`); a share of all of them needs none. The alternative is the variable
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: one number a process for as long as it lives, so that prompts and
decodes of one engine would have to be two processes. While it limits a process, the driver gives
its green contexts no SMs of their own; so it must not be set here.

Engines are processes, and a GPU runs several processes at the same time only where a daemon of MPS
is there. Without one they take turns, and fewer SMs would make each of them slower and none
faster: there, shares are kept by the agent's gate alone.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvmig.core.errors import ConfigError, KvmigError
from kvmig.engines.gate import PARTS, ComputeShares
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.green import GreenStream, SmResource, smallest_groups, under_mps

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def groups_of(parts: int, place: int, groups: int) -> list[int]:
    """Which of the device's groups a share takes, rounded down to whole ones; maybe none.

    place: of the engine in its unit, from 0 on. Every other engine begins at the other end, so two
    have nothing in common as long as their shares are 100 % at most, and more as little as can be.
    """
    count = parts * groups // PARTS
    first = place // 2 * count
    taken = [(first + number) % groups for number in range(count)]
    return taken if place % 2 == 0 else [groups - 1 - number for number in taken]


class SmShares:
    """An engine's streams. Raises ConfigError for a share that is less than the GPU's smallest
    group of SMs, KvmigError in the driver's words where that has no such streams."""

    def __init__(self, driver: CudaDriver, wanted: ComputeShares, unit: str) -> None:
        """unit: its path; the other engines of the unit should get other SMs."""
        self.streams: dict[int, GreenStream] = {}
        """Streams by number of parts; a share of all parts has none."""
        groups = smallest_groups(driver)
        with ExitStack() as held:
            place = held.enter_context(place_in(unit))
            for parts in {wanted.prefill, wanted.decode} - {PARTS}:
                taken = [groups[number] for number in groups_of(parts, place, len(groups))]
                if not taken:
                    raise ConfigError(_too_small(wanted, parts, groups))
                self.streams[parts] = GreenStream(driver, taken)
                held.callback(self.streams[parts].close)
            self._held = held.pop_all()

    def close(self) -> None:
        """Give all SMs back; nothing may be queued there any more."""
        self._held.close()


def open_shares(driver: CudaDriver, wanted: ComputeShares, unit: str) -> SmShares | str:
    """The streams, or why there are none, in a few words. Raises ConfigError."""
    if os.environ.get(PERCENTAGE, "100") != "100":
        return f"{PERCENTAGE} is {os.environ[PERCENTAGE]}, which limits all of its steps alike"
    try:
        if not under_mps(driver):
            return "no daemon of MPS is there, so the engines on this GPU take turns"
        return SmShares(driver, wanted, unit)
    except ConfigError:
        raise
    except KvmigError as error:
        return str(error)


@contextmanager
def place_in(unit: str) -> Iterator[int]:
    """The first number that no living engine of the unit on this host has."""
    digest = hashlib.blake2b(unit.encode(), digest_size=16).hexdigest()
    for number in itertools.count():
        # A name of the kernel's, which ends with the process: one that is killed leaves nothing.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken:
            try:
                taken.bind(f"\0kvmig-share-{digest}-{number}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            yield number
            return


def _too_small(wanted: ComputeShares, parts: int, groups: Sequence[SmResource]) -> str:
    size, count = groups[0].sms, len(groups)
    least = -(-PARTS // count)
    return (
        f"--unit-shares is {wanted.prefill}0,{wanted.decode}0: {parts}0 % are less than the"
        f" {size} SMs that this GPU gives at least, must be {least}0 or more"
    )
