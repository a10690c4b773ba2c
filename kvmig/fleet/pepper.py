"""The fleet's pepper: the secret, in a file of its own, under which API keys are hashed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvmig.accounts.keys import PEPPER_BYTES
from kvmig.fleet.tables import DatabaseUnusable, StoreError


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
