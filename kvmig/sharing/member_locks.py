"""The roll of a unit: which processes may hold memory of it, whether an agent knows them or not.

A file next to the unit's socket, of which each member locks a byte for as long as it lives. The
kernel keeps the locks: a new agent learns from it who was a member of the one before, also of a
process that is stopped and can't report it, and never of one that has ended.
"""

from __future__ import annotations

import fcntl
import os
import struct

from kvmig.core.errors import TransportError

_LOCK = struct.Struct("hhqqi4x")
"""struct flock of Linux on 64 bits: kind, whence, start, length, process."""
_MOST = 1 << 23
"""Bytes. Process numbers are below half of it."""


class MemberLocks:
    """The locks of the unit at a path. The agent closes them; a member's lock ends with its
    process, since to close the file gives it up."""

    def __init__(self, path: str) -> None:
        """path: of the unit's socket. Raises TransportError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._file = os.open(f"{path}.roll", flags, 0o600)
        except OSError as error:
            raise TransportError(f"the roll of unit {path} can't be opened: {error}") from error

    def enter(self) -> None:
        """Count this process as a holder of memory, until it ends. Raises TransportError."""
        # Of its process number, which one of another namespace may have, too.
        for at in range(os.getpid(), _MOST):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
            except BlockingIOError:
                continue
            except OSError as error:
                raise TransportError(f"the roll of the unit can't be locked: {error}") from error
            return
        raise TransportError("the roll of the unit has no byte left")

    def processes(self) -> set[int]:
        """The live processes that have entered, except this one."""
        found: set[int] = set()
        left = [(0, _MOST)]
        while left:
            start, end = left.pop()
            if start == end:
                continue
            wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
            kind, _, at, _, process = _LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, wanted))
            if kind != fcntl.F_UNLCK:
                found.add(process)
                left += [(start, at), (at + 1, end)]
        return found

    def close(self) -> None:
        """Once."""
        os.close(self._file)
