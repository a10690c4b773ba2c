"""The fleet's secrets in files of their own: the pepper, under which API keys are hashed, and the
first admin's key."""

from __future__ import annotations

import os
import secrets
from hashlib import blake2b
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.engine import Connection

from kvmig.accounts.keys import PEPPER_BYTES
from kvmig.fleet.tables import DatabaseUnusable, StoreError, meta


def read_pepper(path: Path, *, make: bool) -> bytes:
    """Read the pepper from this user's file; a new one is on disk before its first use.

    make: whether one is made where there is none. Raises DatabaseUnusable, and StoreError where the
    file can't be read or written.
    """
    part = path.with_name(path.name + ".part")
    try:
        if make and not path.exists():
            part.unlink(missing_ok=True)
            part.touch(mode=0o600)
            part.write_bytes(secrets.token_bytes(PEPPER_BYTES))
            _sync(part)
            part.replace(path)
            _sync(path.parent)
        pepper = path.read_bytes()
    except FileNotFoundError as error:
        raise DatabaseUnusable(
            f"{path} is gone, and with it the secret under which keys are hashed: put it back"
        ) from error
    except OSError as error:
        raise StoreError(f"{path} can't be used: {error}") from error
    if len(pepper) != PEPPER_BYTES:
        raise DatabaseUnusable(f"{path} holds {len(pepper)} bytes, must hold {PEPPER_BYTES}")
    return pepper


def keep_key(path: Path, key: str) -> None:
    """Write the first admin's key where only this user reads it. Raises StoreError."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{key}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{path} can't be written: {error}") from error


def kept_pepper(connection: Connection) -> bytes | None:
    """What a database shows of the pepper of its keys; None: it has no keys yet."""
    kept: bytes | None = connection.scalar(select(meta.c.value).where(meta.c.name == "pepper"))
    return kept


def shown_pepper(pepper: bytes) -> bytes:
    """What a database keeps of a pepper, which can't be had from it."""
    return blake2b(b"pepper", key=pepper).digest()


def fleet_word(pepper: bytes) -> str:
    """A word that all servers of one fleet have, and no other fleet's; the pepper can't be had from
    it."""
    return blake2b(b"fleet", key=pepper, digest_size=16).hexdigest()


def check_pepper(path: Path, pepper: bytes, kept: bytes, database: str) -> None:
    """Raises DatabaseUnusable for one that isn't the database's. kept: what that shows of it."""
    if not secrets.compare_digest(kept, shown_pepper(pepper)):
        raise DatabaseUnusable(
            f"{path} isn't the pepper of the fleet's database {database}: put back the one that was"
            " saved with it"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
