"""OpenMP's helper threads on a CPU: each thread that has ever computed keeps a team of them.

An engine is made on one thread and steps on another. While libgomp holds more threads than there
are cores, those of a running team don't spin for their next piece of work but sleep in the kernel
at once (`gomp_throttled_spin_count_var` in libgomp/env.c): steps of many short operations take a
quarter longer. So the team of the thread that has only made the engine is let go.
"""

from __future__ import annotations

import ctypes

OMP_PAUSE_SOFT = 1
"""omp_pause_resource_t, OpenMP 5.0."""


def let_team_go() -> None:
    """End the calling thread's helper threads; its next parallel region makes new ones.

    Nothing happens where the process has no OpenMP 5 library of its own (`preload`).
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(OMP_PAUSE_SOFT)
