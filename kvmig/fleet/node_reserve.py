"""How many nodes Ray's autoscaler is to keep beyond those that are in use. Pure.

Ray takes the bundles of `request_resources` as what all nodes together are to hold, in use or not:
so there is one for each node in use, one for each instance that waits for a node, and one for each
node to spare.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvmig.core.errors import ConfigError
from kvmig.fleet.workers import FleetWorker

Bundle = Mapping[str, float]
COUNTED = ("CPU", "GPU")
"""What a node is asked for by."""
MOST_BUNDLES = 1000
MOST_NODES = 100_000
ALLOWED = "must be as 3=1,16=2: with fewer than 3 workers 1 spare node, with fewer than 16 two"


class ReserveLadder(NamedTuple):
    """How many spare nodes there are to be, by the number of workers."""

    steps: tuple[tuple[int, int], ...]
    """Numbers of workers, each with the spare nodes below that; the last holds above it, too."""

    def spare(self, workers: int) -> int:
        """The number of spare nodes for a number of workers."""
        found = (count for below, count in self.steps if workers < below)
        return next(found, self.steps[-1][1])


def parse_ladder(text: str) -> ReserveLadder | None:
    """Parse `3=1,16=2`; None: the text is empty. Raises ConfigError."""
    if not text:
        return None
    steps = []
    for part in text.split(","):
        below, equals, count = (one.strip() for one in part.partition("="))
        if not (equals and _is_number(below) and _is_number(count)):
            raise ConfigError(f"--reserve is {text!r:.100}, {ALLOWED}")
        steps.append((int(below), int(count)))
    rises = all(one[0] < other[0] for one, other in itertools.pairwise(steps))
    bounded = all(below <= MOST_NODES and count <= MOST_BUNDLES for below, count in steps)
    if not rises or not bounded:
        raise ConfigError(f"--reserve is {text!r:.100}, {ALLOWED}")
    return ReserveLadder(tuple(steps))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 8


def wanted_bundles(
    ladder: ReserveLadder,
    node: Bundle,
    workers: Iterable[FleetWorker],
    used: Iterable[str],
    waiting: Iterable[Bundle],
) -> tuple[Bundle, ...]:
    """The bundles that all nodes together are to hold. node: of a spare node; empty: the largest
    worker's. used: ids of nodes with instances. waiting: of instances that wait for a node."""
    there = [one for one in workers if one.node and one.state != "lost" and size_of(one)]
    largest = max((size_of(one) for one in there), key=_weight, default={})
    spare = dict(node) or largest
    in_use = set(used)
    found: list[Bundle] = [size_of(one) for one in there if one.node in in_use]
    found += [dict(one) for one in waiting if one]
    found += [spare] * ladder.spare(len(there)) if spare else []
    return tuple(found[:MOST_BUNDLES])


def size_of(worker: FleetWorker) -> dict[str, float]:
    """What a worker has of what nodes are asked for by."""
    amounts = {name: worker.resources.get(name, 0.0) for name in COUNTED}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def _weight(bundle: Bundle) -> list[float]:
    return [bundle.get(name, 0.0) for name in reversed(COUNTED)]
