"""Freeness: for how long an instance's batch can go on growing (Llumnix, section 4.4).

F = (M - sum V) / B, in KV blocks per request: M the instance's blocks, V the virtual
usage of its requests, B its batch size.

Example: 851 blocks, 40 running requests that hold 651: F = 200 / 40 = 5 blocks, so
each can grow by 5 blocks (80 tokens, at 16 per block) before one is preempted.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from kvmig.controlplane.view import Column, InstanceView, ViewColumns

Queued = Literal["head", "all"]
"""How much of a queue counts.

head: the first request's demand, as in the paper. all: that of all. With the head only,
an instance with a hundred waiting requests looks like one with a single one, and bursts
of long prompts end up worse than under round robin.
"""


def freeness(free: float, batch: int) -> float:
    """The paper's F for `free` = M - sum V: +inf when idle, negative when overloaded."""
    if batch == 0 and free >= 0:
        return math.inf
    return free / max(batch, 1)


def slack(free: float, batch: int) -> float:
    """F where there is room, and the plain number of missing blocks where there is none.

    Below zero the quotient ranks wrongly: of two overloaded instances the one with more
    requests would look freer, and moving a request away could make its source look worse.
    Slack only grows as blocks become free.
    """
    return free if free < 0 else freeness(free, batch)


def free_blocks(one: InstanceView, queued: Queued = "head") -> float:
    """M - sum V, with what is on its way counted as usage."""
    behind = one.behind_blocks if queued == "all" else 0
    return one.load.total_blocks - one.virtual_blocks - behind - one.pending_blocks


def batch_size(one: InstanceView, queued: Queued = "head") -> int:
    """B: the requests whose usage `free_blocks` counts as lasting."""
    if queued == "all":
        return one.requests
    return one.load.running or int(one.requests > 0)


def instance_freeness(one: InstanceView) -> float:
    """The paper's F of an instance, for reports and metrics."""
    return freeness(free_blocks(one), batch_size(one))


# -- the same over all instances


def free_blocks_of(columns: ViewColumns, queued: Queued) -> Column:
    """`free_blocks` of each."""
    return columns.room if queued == "all" else columns.free


def batch_sizes(columns: ViewColumns, queued: Queued) -> Column:
    """`batch_size` of each."""
    if queued == "all":
        return columns.requests
    return np.where(columns.running > 0, columns.running, columns.requests > 0)


def freenesses(free: Column, batch: Column) -> Column:
    """`freeness` of each."""
    return np.where((batch == 0) & (free >= 0), np.inf, free / np.maximum(batch, 1))


def slacks(free: Column, batch: Column) -> Column:
    """`slack` of each."""
    quotients = np.where(batch == 0, np.inf, free / np.maximum(batch, 1))
    return np.where(free < 0, free, quotients)
