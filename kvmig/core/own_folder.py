"""A folder for temporary files of one user, which no other user can read or put links into."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def own_folder() -> Path:
    """The folder that all processes of the user on this host share. Raises OSError."""
    folder = Path(tempfile.gettempdir()) / f"kvmig-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user may open")
    return folder
