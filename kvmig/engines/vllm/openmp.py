"""OpenMP's threads in a process that computes with vLLM on a CPU."""

from __future__ import annotations

import ctypes

OMP_PAUSE_SOFT = 1
"""omp_pause_resource_t, OpenMP 5.0."""


def let_team_go() -> None:
    """End the calling thread's OpenMP helpers; its next parallel region makes new ones.

    An engine is made on one thread and steps on another, and each thread that has ever computed
    keeps a team of helpers. While libgomp holds more threads than there are cores, those of a
    running team don't spin for their next piece of work but sleep in the kernel at once
    (`gomp_throttled_spin_count_var` in libgomp/env.c): steps of many short operations take a
    quarter longer.

    Nothing happens where the process has no OpenMP 5 library of its own (`preloaded`).
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(OMP_PAUSE_SOFT)
