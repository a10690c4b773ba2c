"""What all proxies of a fleet have let in, counted in one file that each of them has mapped.

A proxy has a seat: a byte of the file that it keeps locked while it lives. What runs is counted by
seat. The kernel gives up the lock of a proxy that is killed, and the next one that finds its seat
empty takes what it had off the count. A decision from several numbers is made under one
more lock, for some microseconds. Nothing waits: who doesn't get that lock, because a proxy was
stopped while it had it, decides without.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from math import inf
from pathlib import Path

from kvmig.accounts.limits import MINUTE_S, AccountTally, ArrivalDebt, OwnTally
from kvmig.core.clock import TimeSource, monotonic

log = logging.getLogger(__name__)

SLOTS = 16_384
"""Keys and users that are counted at a time."""
PROBES = 64
"""Slots in which one of them may be."""
SEATS = 64
"""Proxies at a time."""
WAIT_S = 0.02
"""Longest wait for the lock."""
BLIND_S = 1.0
"""Time in which a lock that wasn't had is not waited for again."""

_HEAD = struct.Struct("<8sd")
_MAGIC = b"kvmigT1\n"
_SLOT = struct.Struct("<16sddd")
"""Key; arrivals: count, time, and when nothing of them is left."""
_RUNNING = struct.Struct(f"<{SEATS}i")
_COUNT = struct.Struct("<i")
_SLOTS_AT = 64
_RUNNING_AT = _SLOTS_AT + _SLOT.size * SLOTS
_SIZE = _RUNNING_AT + _RUNNING.size * SLOTS
_NOBODY = bytes(16)
_LOCK_AT = SEATS
"""Byte of the lock of all numbers; those before it are the seats."""


class SharedTallies:
    """One proxy's view of the file. Implements `kvmig.accounts.limits.AccountTallies`."""

    def __init__(self, path: Path, clock: TimeSource = monotonic) -> None:
        """clock: the same for all proxies. Raises OSError."""
        self._clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._seat = self._take_seat()
            os.ftruncate(self._file, _SIZE)
            self._map = mmap.mmap(self._file, _SIZE)
        except BaseException:
            os.close(self._file)
            raise
        self._blind_until = -inf
        with self.locked():
            self._begin()

    def close(self) -> None:
        """Leave the seat: what this proxy has let in counts no more."""
        self._map.close()
        os.close(self._file)

    def tally_of(self, whose: str) -> AccountTally:
        """The tally of a `Limited.id`."""
        return SharedTally(self, blake2b(whose.encode(), digest_size=16).digest())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other changes within the block, which must be short."""
        locked = self._lock()
        try:
            yield
        finally:
            if locked:
                _set_lock(self._file, _LOCK_AT, fcntl.F_UNLCK)

    # -- numbers, by slot

    def find(self, whose: bytes) -> int | None:
        """The slot of a tally, a new one if it has none; None: all are in use."""
        free = None
        start = int.from_bytes(whose[:8], "little")
        for step in range(PROBES):
            slot = (start + step) % SLOTS
            found, *_ = self._read(slot)
            if found == whose:
                return slot
            if free is None and self._is_idle(slot):
                free = slot
            if found == _NOBODY:
                break
        if free is not None:
            _, created = _HEAD.unpack_from(self._map)
            self._write(free, whose, inf, created, created + MINUTE_S)
        return free

    def is_at(self, whose: bytes, slot: int) -> bool:
        """Whether it has that slot."""
        found, *_ = self._read(slot)
        return bool(found == whose)

    def arrivals(self, slot: int) -> ArrivalDebt:
        """The arrivals at all proxies."""
        _, count, at, _ = self._read(slot)
        return ArrivalDebt(count, at)

    def note_arrivals(
        self, whose: bytes, slot: int, arrivals: ArrivalDebt, forget_at: float
    ) -> None:
        """Record the arrivals for all proxies."""
        self._write(slot, whose, *arrivals, forget_at)

    def running(self, slot: int) -> int:
        """Running requests of all live proxies."""
        counts = _RUNNING.unpack_from(self._map, _RUNNING_AT + slot * _RUNNING.size)
        total = int(sum(counts))
        for seat, count in enumerate(counts):
            if count and seat != self._seat and self._is_empty(seat):
                total -= count
        return total

    def add_running(self, slot: int, change: int) -> None:
        """Change the running requests of this proxy."""
        at = _RUNNING_AT + slot * _RUNNING.size + self._seat * _COUNT.size
        (count,) = _COUNT.unpack_from(self._map, at)
        _COUNT.pack_into(self._map, at, count + change)

    def _read(self, slot: int) -> tuple[bytes, float, float, float]:
        whose, count, at, forget_at = _SLOT.unpack_from(self._map, _SLOTS_AT + slot * _SLOT.size)
        return whose, count, at, forget_at

    def _write(self, slot: int, whose: bytes, count: float, at: float, forget_at: float) -> None:
        _SLOT.pack_into(self._map, _SLOTS_AT + slot * _SLOT.size, whose, count, at, forget_at)

    def _is_idle(self, slot: int) -> bool:
        *_, forget_at = self._read(slot)
        return forget_at <= self._clock() and not self.running(slot)

    # -- seats, and the lock

    def _take_seat(self) -> int:
        for seat in range(SEATS):
            if _set_lock(self._file, seat, fcntl.F_WRLCK):
                return seat
        raise OSError(f"there are {SEATS} proxies already")

    def _is_empty(self, seat: int) -> bool:
        """Whether it is free; what its last one had let in is forgotten then."""
        if not _set_lock(self._file, seat, fcntl.F_WRLCK):
            return False
        self._clear(seat)
        _set_lock(self._file, seat, fcntl.F_UNLCK)
        return True

    def _clear(self, seat: int) -> None:
        numbers = memoryview(self._map)[_RUNNING_AT:_SIZE].cast("i")
        try:
            numbers[seat::SEATS] = memoryview(bytes(_COUNT.size * SLOTS)).cast("i")
        finally:
            numbers.release()

    def _begin(self) -> None:
        """Take the seat, where nothing of its last proxy counts any more. A file of before the
        machine's last start, or of another kind, is emptied: its times mean nothing now."""
        magic, created = _HEAD.unpack_from(self._map)
        now = self._clock()
        if magic != _MAGIC or created > now:
            self._map[:] = bytes(_SIZE)
            _HEAD.pack_into(self._map, 0, _MAGIC, now)
        self._clear(self._seat)

    def _lock(self) -> bool:
        if self._clock() < self._blind_until:
            return False
        until = time.monotonic() + WAIT_S
        while not _set_lock(self._file, _LOCK_AT, fcntl.F_WRLCK):
            if time.monotonic() > until:
                log.warning("the lock of the limits is not to be had: another proxy stands still")
                self._blind_until = self._clock() + BLIND_S
                return False
            time.sleep(0)
        return True


class SharedTally:
    """One key's or user's."""

    def __init__(self, all_of_them: SharedTallies, whose: bytes) -> None:
        self._all = all_of_them
        self._whose = whose
        self._slot: int | None = None
        self._own = OwnTally()
        """What this proxy alone has let in, for when no slot is free."""
        self._own_running = 0

    def running(self) -> int:
        slot = self._find()
        return self._own.running() if slot is None else self._all.running(slot)

    def arrivals(self) -> ArrivalDebt:
        slot = self._find()
        return self._own.arrivals() if slot is None else self._all.arrivals(slot)

    def enter(self, requests: int) -> None:
        slot = self._find()
        if slot is None:
            self._own.enter(requests)
            self._own_running += requests
        else:
            self._all.add_running(slot, requests)

    def end_requests(self, requests: int) -> None:
        own = min(requests, self._own_running)
        if own:
            self._own.end_requests(own)
            self._own_running -= own
        if requests > own and (slot := self._find()) is not None:
            self._all.add_running(slot, own - requests)

    def note_arrivals(self, arrivals: ArrivalDebt, forget_at: float) -> None:
        slot = self._find()
        if slot is None:
            self._own.note_arrivals(arrivals, forget_at)
        else:
            self._all.note_arrivals(self._whose, slot, arrivals, forget_at)

    def _find(self) -> int | None:
        if self._slot is None or not self._all.is_at(self._whose, self._slot):
            self._slot = self._all.find(self._whose)
        return self._slot


def _set_lock(file: int, byte: int, kind: int) -> bool:
    """Lock one byte of an open file, or unlock it; False: another open file has it locked."""
    wanted = struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, wanted)
    except BlockingIOError:
        return False
    except PermissionError:  # what some systems say instead
        return False
    return True
