"""The same work for many jobs, in several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from bench import report

Job = TypeVar("Job")
Sample = TypeVar("Sample")


def work_through(
    work: Callable[[Job], Sample], jobs: Sequence[Job], workers: int | None
) -> list[Sample]:
    """What `work` finds for each job, in their order, behind a bar. workers: processes; None: one
    a core."""
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        report.progress() as bar,
    ):
        return list(bar.track(pool.map(work, jobs), total=len(jobs), description="runs"))
