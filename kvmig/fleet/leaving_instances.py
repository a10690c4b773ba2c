"""What is done next with a model's instances on workers that are drained, or were lost. Pure.

They don't count: the model gets others in their place first, on other workers, where there is room.
Then they are drained: their requests move. Nothing of it is kept but the order to drain the worker,
so that a server which has just started goes on from what it sees.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvmig.fleet.autoscale import GROWTH, InstanceLoad
from kvmig.fleet.workers import Leaving


class LeavingStep(NamedTuple):
    """What is ordered now, by instances' names."""

    drained: tuple[str, ...] = ()
    """Their requests move; then they end."""
    removed: tuple[str, ...] = ()
    """No request runs on them: they end."""
    kept: tuple[str, ...] = ()
    """Their drain was ordered, and is so no more: they serve again."""
    renewed: tuple[str, ...] = ()
    """Their requests move already, and have another deadline now."""
    blocked: str = ""
    """Why the others stay for now; empty: none does."""


def leaving_step(
    instances: Sequence[InstanceLoad],
    leaving: Mapping[str, Leaving],
    departing: Collection[str],
    wanted: int,
    no_room: str,
) -> LeavingStep:
    """The next step. leaving: why instances leave, by name. departing: those that were drained for
    that. wanted: instances of the model. no_room: why no worker takes another one; empty: one does.
    """
    staying = [one for one in instances if one.id not in leaving]
    going = [one for one in instances if one.id in leaving and one.state != "draining"]
    serving = [one for one in staying if one.state == "serving"]
    runs = [one for one in going if leaving[one.id] == "drain" and one.state == "serving"]
    dead = [one for one in going if one not in runs]
    # The deployment ends with its last instance, and one that starts may fail.
    removed = dead if serving else []
    enough = len(serving) >= wanted or bool(no_room and serving and _hold(serving, runs))
    drained = runs if enough else []
    stay = len(going) > len(removed) + len(drained)
    return LeavingStep(
        tuple(one.id for one in drained),
        tuple(one.id for one in removed),
        tuple(one.id for one in staying if one.state == "draining" and one.id in departing),
        blocked=(no_room or "other instances start first") if stay else "",
    )


def _hold(staying: Sequence[InstanceLoad], leaving: Sequence[InstanceLoad]) -> bool:
    """Whether those that stay have room for what runs on the others, and for its growth."""
    every = [*staying, *leaving]
    used = sum(one.blocks_used for one in every)
    growth = GROWTH * sum(one.running + one.waiting for one in every)
    return sum(one.blocks_total for one in staying) - used >= growth
