"""The folders in which vLLM and its libraries keep what they have compiled, so that the next start
finds it.

By themselves they keep it in the user's home, and fail where that can't be written to. Compiled
code is loaded and run as it is: a folder that others can write to must never be the place.
"""

from __future__ import annotations

import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from kvmig.core.own_folder import own_folder

USUAL = {"XDG_CACHE_HOME": ".cache", "TRITON_HOME": "", "FLASHINFER_WORKSPACE_BASE": ""}
"""Variables of vLLM, Triton and FlashInfer, and the folder of the home that each one means."""


def choose_caches(environment: MutableMapping[str, str]) -> Path | None:
    """Set variables for a folder of this user among the temporary files, where the home can't be
    written to; the folder, or None.

    What the user has set stays. Without any folder nothing is set, and libraries report what
    they lack.
    """
    home = Path(environment.get("HOME") or "/")
    unset = [name for name in USUAL if not environment.get(name)]
    if all(_takes_files(home / USUAL[name]) for name in unset):
        return None
    try:
        folder = own_folder() / "cache"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    environment.update({name: str(folder) for name in unset})
    return folder


def _takes_files(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
