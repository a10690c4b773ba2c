"""Shared memory: both llumlets map one file in /dev/shm, and no byte travels.

The file is one page of header, which starts with a random nonce, then the slots.
The offer's token names the file and the nonce, so a destination that reads the
same nonce sees the same memory; on another host, in another container or as
another user it doesn't, and goes on to the next offer.

The source holds a lock on its file for as long as it lives, so that a file whose
owner was killed differs from one in use (`sweep`).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
from pathlib import Path

from kvmig.core.errors import TransportError
from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.kvtransfer.transports.base import (
    AnnounceChunk,
    BufferShape,
    TransportChannel,
    TransportInbox,
)
from kvmig.kvtransfer.transports.host_memory import HostChannel, HostStaging, unmap

NAME = "shm"
FOLDER = Path("/dev/shm")  # noqa: S108
PREFIX = "kvmig"
NONCE_BYTES = 16
FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE
"""Populate: no copy stops for a page fault."""


class ShmToken(BufferShape, frozen=True):
    """Names the memory to the destination, with a proof that it is the right one."""

    file: str
    nonce: str


class ShmStaging(HostStaging):
    """Slots in a file of this process's own, gone at `close`."""

    transport = NAME
    fuses = True

    def __init__(
        self, cluster: str, instance: str, slots: int, slot_bytes: int, folder: Path = FOLDER
    ) -> None:
        """Raises TransportError if the folder is missing, full or not writable."""
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = mmap.PAGESIZE + slots * slot_bytes
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            self._path, self._lock = _create(folder, cluster, instance)
        except OSError as error:
            raise TransportError(f"no shared memory in {folder}: {error.strerror}") from error
        try:
            # Takes the memory now: otherwise a full folder is a SIGBUS at the first copy.
            os.posix_fallocate(self._lock, 0, size)
            os.pwrite(self._lock, nonce, 0)
            memory = mmap.mmap(self._lock, size, flags=FLAGS)
        except OSError as error:
            self._remove()
            raise TransportError(
                f"no {size} bytes of shared memory in {folder}: {error.strerror}"
            ) from error
        self._token = ShmToken(slots, slot_bytes, self._path.name, nonce.hex())
        super().__init__(memory, slots, slot_bytes, mmap.PAGESIZE)

    def offer(self) -> TransportOffer:
        """The file's name and nonce."""
        return TransportOffer(NAME, self._token.token())

    def _connect(self, token: str) -> TransportChannel:
        return ShmChannel(self)

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def _free_memory(self) -> None:
        self._remove()
        super()._free_memory()


class ShmChannel(HostChannel):
    """Moves nothing: the destination reads the slot itself."""

    async def push(self, chunk: Chunk, announce: AnnounceChunk) -> None:
        """Announce the chunk: its bytes are there already."""
        announce()


class ShmInbox(TransportInbox):
    """The source's slots, mapped read-only unless this side's GPU can't pin such pages."""

    transport = NAME

    def __init__(
        self, offer: TransportOffer, folder: Path = FOLDER, writable: bool = False
    ) -> None:
        """writable: how to map it, though nothing here writes. Raises TransportError if this
        process can't see the source's memory."""
        self._token = ShmToken.from_offer(offer)
        self._memory, self._file = _open(self._token, folder, writable)
        self._closed = False

    @property
    def memory(self) -> memoryview:
        """See `TransportInbox`."""
        return memoryview(self._memory)

    @property
    def stale(self) -> bool:
        """Whether the file was removed, by the source or after its death."""
        return self._closed or os.fstat(self._file).st_nlink == 0

    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk in its slot."""
        if self._closed:
            raise TransportError("the source's shared memory was given up")
        self._token.check_chunk(chunk, payload)
        start = mmap.PAGESIZE + chunk.slot * self._token.slot_bytes + chunk.offset
        return memoryview(self._memory)[start : start + chunk.nbytes].toreadonly()

    def close(self) -> None:
        """Unmap."""
        if self._closed:
            return
        self._closed = True
        os.close(self._file)
        unmap(self._memory)


def sweep(cluster: str | None = None, folder: Path = FOLDER) -> list[str]:
    """Remove this user's files of `cluster`, or all whose owner is dead; returns their names.

    The first is for a launcher whose llumlets have ended, the second for one that starts.
    """
    removed: list[str] = []
    pattern = f"{PREFIX}-*" if cluster is None else f"{PREFIX}-{_checked(cluster)}-*"
    for path in sorted(folder.glob(pattern)):
        # Another process may remove it first, and a file of another user is not ours to touch.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_uid == os.geteuid() and (cluster or _lock(file)):
                    path.unlink()
                    removed.append(path.name)
            finally:
                os.close(file)
    return removed


def _create(folder: Path, cluster: str, instance: str) -> tuple[Path, int]:
    """A new, locked file that only this user can open."""
    stem = f"{PREFIX}-{_checked(cluster)}-{re.sub('[^A-Za-z0-9_.-]', '_', instance)}"
    while True:
        path = folder / f"{stem}-{secrets.token_hex(8)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if _lock(file) and os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # a sweep came between the two lines


def _open(token: ShmToken, folder: Path, writable: bool) -> tuple[mmap.mmap, int]:
    """The source's memory and its file, if it is what the token says."""
    if not re.fullmatch(rf"{PREFIX}-[A-Za-z0-9_.-]+", token.file):
        raise TransportError(f"{token.file!r} is no name of a staging file")
    size = mmap.PAGESIZE + token.slots * token.slot_bytes
    try:
        mode = os.O_RDWR if writable else os.O_RDONLY
        file = os.open(folder / token.file, mode | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"can't see {token.file}: {error.strerror}") from error
    try:
        same = os.pread(file, NONCE_BYTES, 0).hex() == token.nonce
        if not same or os.fstat(file).st_size != size:
            raise TransportError(f"{token.file} is not the source's memory")
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(file, size, flags=FLAGS, prot=prot), file
    except OSError as error:
        os.close(file)
        raise TransportError(f"can't map {token.file}: {error.strerror}") from error
    except TransportError:
        os.close(file)
        raise


def _lock(file: int) -> bool:
    """Lock the file for as long as it is open; False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _checked(cluster: str) -> str:
    """The cluster's name, without a dash, so that its files never look like another cluster's."""
    if not re.fullmatch("[A-Za-z0-9_.]+", cluster):
        raise ValueError(f"cluster id {cluster!r} may hold letters, digits, _ and . only")
    return cluster
