"""Explores the handshake, a model's life in a fleet, its roll-out and its workers: `python -m
kvmig_tools.check`.

Exits with 1 on a broken invariant.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence

from kvmig_tools.check import life, second_life, worker_life
from kvmig_tools.check.explore import Result
from kvmig_tools.check.scenarios import LIFE, SCENARIOS, Scenario, explore

INVARIANTS = """\
Invariants, in every state:
  at most one side decodes a request under an epoch whose tokens the client takes: one that is
    fenced, or whose run was given up, may decode beside it until it is told
  the client gets every token, none twice, in order
  a request that decodes has all its blocks
  a commit is carried out once, and never undone
  no machine gets an event that its state has no arrow for
  some side decodes it again after a lease at most, and a reply's time-out for each further fault
and at every end, which comes whatever happens (there is no circle):
  every reserved block is given back, no migration is left
  the client has its whole answer, if an instance and its front end live
of an idle session that moves while its next turn comes, in every state:
  a prompt finds no block that holds something else, nobody copies or frees others' blocks
  it is whole somewhere, and where the front end remembers it, unless its blocks had to make way
  or an instance died; what died is remembered no more
and of a model that starts from zero, whatever dies, in every state:
  it has one deployment at most, which answers until its last stream has ended
  no request is sent to one that was told to end
  who waits for it can be served, unless it is off
and of a model that rolls out to another deployment, whatever dies, in every state:
  no call is sent to one of the two that was told to end, none waits while one serves
  it is done only once the old one is gone; a roll-out that runs can be done, or stop
  who waits can be served"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status."""
    options = _options(arguments)
    print(INVARIANTS, end="\n\n")
    chosen = _chosen(options)
    broken = _explore_handshakes(chosen) if chosen else False
    if options.only in (None, LIFE):
        parks = (False, True) if options.long or options.only else (False,)
        broken = _explore_lives(2 if options.long else 1, parks) or broken
    print("An invariant is broken." if broken else "All invariants hold.")
    return 1 if broken else 0


def _explore_handshakes(chosen: list[Scenario]) -> bool:
    """Explore and print each; whether an invariant is broken."""
    columns = f"{'faults':>7}{'states':>10}{'events':>10}{'ends':>7}{'gap s':>7}{'cpu s':>7}"
    print(f"{'scenario':21}{columns}")
    began, results = time.perf_counter(), []
    for scenario, result in zip(chosen, _explored(chosen), strict=True):
        results.append(result)
        _print(scenario, result)
    seconds = time.perf_counter() - began
    states, events = (sum(getattr(one, name) for one in results) for name in ("states", "events"))
    longest = max(results, key=lambda one: one.gap_s)
    print(f"\n{states:,} states, {events:,} events in {seconds:.1f} s.")
    print(f"Two requests beside each other: {sum(one.pairs for one in results):,} states.")
    print(
        f"Longest time for which nobody decodes: {longest.gap_s:g} s, as time-outs are by default:"
    )
    print("\n".join(f"  {one}" for one in longest.gap))
    return any(one.violation for one in results)


def _explore_lives(most: int, parks: Sequence[bool]) -> bool:
    """The same of a model's life. most: clients at once; parks: whether it is parked or ends."""
    broken = False
    for is_parked in parks:
        lives = life.explore(most, parks=is_parked)
        what = "that is parked" if is_parked else "from zero and back"
        print(f"A model's life {what}: {lives.states:,} states, {lives.events:,} events.")
        _print_violation(lives)
        broken = broken or bool(lives.violation)
    rolling = second_life.explore()
    print(f"A model's roll-out: {rolling.states:,} states, {rolling.events:,} events.")
    _print_violation(rolling)
    placed = worker_life.explore()
    print(f"A model's instances on workers: {placed.states:,} states, {placed.events:,} events.")
    _print_violation(placed)
    return broken or bool(rolling.violation or placed.violation)


def _explored(chosen: list[Scenario]) -> Iterator[Result]:
    """In their order; each in a process of its own, as many at once as there are cores."""
    if len(chosen) == 1:
        yield explore(chosen[0])
        return
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, len(chosen))) as pool:
        yield from pool.imap(explore, chosen)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvmig_tools.check", description=__doc__)
    names = [*(scenario.name for scenario in SCENARIOS), LIFE]
    parser.add_argument("--only", metavar="NAME", choices=names, help=f"one of: {', '.join(names)}")
    parser.add_argument(
        "--faults", type=_count, metavar="N", help="at most so many in each (default: 1 or 2)"
    )
    parser.add_argument(
        "--whole", action="store_true", help="compare two requests of three stages with faults, too"
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="what takes minutes, too: two requests of three stages, more clients of a model, one "
        "that is parked",
    )
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> list[Scenario]:
    long = options.long or options.whole
    chosen = [
        one
        for one in SCENARIOS
        if options.only == one.name or (options.only is None and (long or not one.long))
    ]
    if options.faults is not None:
        chosen = [one.with_faults(options.faults) for one in chosen]
    return [one.whole() for one in chosen] if options.whole else chosen


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"is {text}, must be a whole number, 0 or more")
    return int(text)


def _print(scenario: Scenario, result: Result) -> None:
    print(
        f"{scenario.name:21}{scenario.faults:7}{result.states:10,}{result.events:10,}"
        f"{result.ends:7,}{result.gap_s:7g}{result.seconds:7.1f}",
        flush=True,
    )
    if result.pairs:
        print(f"  both: {result.pairs:,} states; at one process: {result.shared:,}, compared")
    _print_violation(result)


def _print_violation(result: Result | life.Lives) -> None:
    if result.violation:
        print(f"\n{result.violation}:")
        print("\n".join(f"  {at + 1:3} {label}" for at, label in enumerate(result.trace)))


if __name__ == "__main__":
    sys.exit(main())
