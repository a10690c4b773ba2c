"""Several servers beside each other: the same plans, one server after the other, at a rate that all
of them can do."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Protocol, TypeVar

from bench import report
from bench.site import all_up
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served

Site = TypeVar("Site")
Plan = TypeVar("Plan")
Sample = TypeVar("Sample")


class PlayedRound(Protocol):
    """What a round counted."""

    @property
    def seconds(self) -> float:
        """Its length."""
        ...


Row = TypeVar("Row", bound=PlayedRound)


@contextmanager
def servers_beside(
    flags: Mapping[str, Sequence[str]], model: Path, nursery: Nursery | None = None
) -> Iterator[dict[str, Served]]:
    """A server for each name, all up at the same time. flags: of each, by name."""
    with tempfile.TemporaryDirectory() as folder:
        servers = {
            name: Served(
                words, model=model, nursery=nursery, log=Path(folder) / name.replace(" ", "-")
            )
            for name, words in flags.items()
        }
        report.say(f"starting {len(servers)} servers")
        with all_up(list(servers.values())):
            yield servers


async def play_rounds(
    sites: Mapping[str, Site],
    options: argparse.Namespace,
    settings: dict[str, object],
    burst: Callable[[Site], Awaitable[float]],
    plans_of: Callable[[float], Sequence[Plan]],
    play: Callable[[Site, Plan, int], Awaitable[tuple[Row, list[Sample]]]],
) -> tuple[list[Row], list[Sample]]:
    """Bursts, which find the rate, then the rounds; `settings` gets the rate.

    burst: of `options.burst` calls at once, how many a server ends a second: `options.load` of the
    mean over the servers is the rate, unless `options.rate` is one. plans_of: the rounds' plans.
    play: plays one at one server, in the round of that number, from 0. The order of the servers
    turns from round to round.
    """
    speeds = []
    for name, site in sites.items():
        speeds.append(await burst(site))
        report.say(f"{name}: {options.burst} calls at once: {speeds[-1]:.3g} calls/s")
    rate = options.rate or options.load * fmean(speeds)
    settings["rate"] = round(rate, 4)
    report.say(f"the rate is {rate:.3g} a second")
    rows: list[Row] = []
    samples: list[Sample] = []
    names = list(sites)
    for repeat, plan in enumerate(plans_of(rate)):
        turn = repeat % len(names)
        for name in (*names[turn:], *names[:turn]):
            row, some = await play(sites[name], plan, repeat)
            rows.append(row)
            samples += some
            report.say(f"round {repeat + 1}, {name}: {len(some)} answers in {row.seconds:.0f} s")
    return rows, samples
