"""How many front ends a server has where none are asked for. Pure."""

from __future__ import annotations

MOST = 4
"""More bring little: a client's stream is in one, and other processes want cores, too."""
CORES_OF_GPU = 2
"""Cores that an engine's own threads keep busy for each GPU."""
CORES_EACH = 4
"""Cores beyond these for each front end, whose tokenizers have threads, too."""


def usual_front_ends(cores: int, gpus: int) -> int:
    """The usual number of front ends: on a host with GPUs as many as there are cores for.

    On a CPU the engines want all cores, and make fewer tokens than one front end can send.
    """
    if not gpus:
        return 1
    return max(1, min(MOST, (cores - CORES_OF_GPU * gpus) // CORES_EACH))
