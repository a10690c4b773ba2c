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
from bench.models import NAMES
from bench.site import all_up
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served

MODEL = "device15ms"
"""The bundled model at the pace of a device: see `bench.paced`."""
Site = TypeVar("Site")
Plan = TypeVar("Plan")
Sample = TypeVar("Sample")


def parse_options(
    root: argparse.ArgumentParser,
    argv: list[str] | None,
    *,
    each: str,
    unit: str,
    load: float,
    seconds: tuple[float, float],
    seconds_help: str,
) -> argparse.Namespace:
    """The options of rounds of engines, with their defaults.

    each: what a round is of, in help texts. unit: what the rate counts. seconds: of a quick run,
    and of a whole one.
    """
    quick_s, whole_s = seconds
    root.add_argument("--model", default=MODEL, help=f"{', '.join(NAMES)} or a folder")
    root.add_argument("--repeats", type=int, help=f"rounds of each {each}; default 3")
    root.add_argument("--seconds", type=float, help=f"{seconds_help}; default {whole_s:g}")
    root.add_argument("--burst", type=int, help="calls at once, before anything counts; default 48")
    root.add_argument("--load", type=float, default=load, help="share of what a burst gives")
    root.add_argument("--rate", type=float, default=0.0, help=f"{unit} a second; 0: by --load")
    options = root.parse_args(argv)
    quick = options.quick
    options.repeats = options.repeats or (1 if quick else 3)
    options.seconds = options.seconds or (quick_s if quick else whole_s)
    options.burst = options.burst or (12 if quick else 48)
    return options


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
