"""What `migration` measures: requests that stay, move, stand still or begin again, and others.

Whether a move changes a stream shows only where streams that stay are the same each time. So each
prompt has three controls, two at one engine and one at the other: a moved stream must be equal to
them as far as they are equal to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, takewhile
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.gpu.engine_pair import Remote
from bench.gpu.engine_process import BLOCKING, LIVE, Came
from kvmig.core.live_records import PAUSE_PARTS

EVERY = 8
"""Tokens between two moves of a request."""
MOVES = {LIVE: 4, BLOCKING: 2}
OTHERS = 4
"""Requests at each engine while another one moves."""
LASTING = 256
"""Tokens a move that requests have to outlast it."""
QUIET = 6
"""Gaps before a move that those in it are compared with."""


@dataclass(frozen=True, slots=True)
class Story:
    """A request as its client has seen it, over both engines."""

    tokens: list[int]
    logprobs: list[float]
    usual_ms: float
    """Between two tokens of one engine, median."""
    switches_ms: list[float]
    """Between the last token of one engine and the first of the other."""

    def common(self, other: Story) -> int:
        """Tokens up to the first that differs, itself or in its log-probability."""
        mine, theirs = (zip(one.tokens, one.logprobs, strict=True) for one in (self, other))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False))
        return sum(1 for _ in same)


class Moves:
    """All on two engines; whoever comes back has left nothing there."""

    def __init__(self, a: Remote, b: Remote, vocabulary: int) -> None:
        self._a, self._b = a, b
        self._vocabulary = vocabulary
        self._numbers = count()

    def compare(self, tokens: int) -> dict[str, Any]:
        """One sample, of prompts with so many tokens. Raises RuntimeError or TransportError."""
        prompt = self._prompt(tokens)
        moved = {mode: self._run(prompt, mode, moves) for mode, moves in MOVES.items()}
        total = max(len(story.tokens) for story, _ in moved.values())
        stays, *controls = (self._stay(prompt, total, at) for at in (self._a, self._a, self._b))
        sample: dict[str, Any] = {"tokens": tokens, "step_ms": stays.usual_ms}
        sample |= judged([story for story, _ in moved.values()], stays, controls)
        for mode, (story, _) in moved.items():
            sample[f"{mode}_ms"] = median(story.switches_ms) - stays.usual_ms
        sample |= _copied(moved[LIVE][1])
        recompute = self._first_token_ms(prompt, stays.tokens[:EVERY])
        sample["recompute_ms"] = recompute - stays.usual_ms
        return sample

    def _run(self, prompt: list[int], mode: str, moves: int) -> tuple[Story, list[dict[str, Any]]]:
        """From `a` to `b`, back, and so on, as long as that takes; with the reports."""
        reports: list[dict[str, Any]] = []
        name, here, there = self._name(mode), self._a, self._b
        here.call("submit", name, prompt, moves * LASTING)
        has = {here.name: 0, there.name: 0}
        has[here.name] = len(here.wait(name, EVERY).tokens)
        for _ in range(moves):
            reports.append(self._move(name, here, there, mode))
            here, there = there, here
            has[here.name] = len(here.wait(name, has[here.name] + EVERY).tokens)
        story = told({one.name: one.wait(name, 0) for one in (self._a, self._b)})
        self._clear()
        if len(story.switches_ms) != moves:
            raise RuntimeError(f"{name} has switched {len(story.switches_ms)} times, not {moves}")
        return story, reports

    def _stay(self, prompt: list[int], total: int, at: Remote) -> Story:
        name = self._name("stays")
        at.call("submit", name, prompt, total)
        story = told({at.name: at.wait(name, total)})
        self._clear()
        return story

    def _first_token_ms(self, prompt: list[int], known: list[int]) -> float:
        name = self._name("recompute")
        begun: float = self._b.call("submit", name, prompt, len(known) + 1, known)
        came = self._b.wait(name, 1)
        self._clear()
        return (came.times[0] - begun) * 1e3

    def interfere(self, tokens: int, moves: int) -> list[dict[str, Any]]:
        """A sample for each move: how much longer others' gaps are meanwhile, at both engines."""
        ends, lasting = {one.name: one for one in (self._a, self._b)}, moves * LASTING
        others = {end: [self._name("other") for _ in range(OTHERS)] for end in ends}
        for end, names in others.items():
            for name in names:
                ends[end].call("submit", name, self._prompt(EVERY), lasting)
            for name in names:
                ends[end].wait(name, 1)
        name, here, there = self._name("mover"), self._a, self._b
        here.call("submit", name, self._prompt(tokens), lasting)
        has, windows = dict.fromkeys(ends, 0), list[tuple[str, float, float]]()
        for _ in range(moves):
            has[here.name] = len(here.wait(name, has[here.name] + 2 * EVERY).tokens)
            report = self._move(name, here, there, LIVE)
            windows.append((here.name, report["began"], report["began"] + copying_s(report)))
            here, there = there, here
        here.wait(name, has[here.name] + EVERY)
        times = {end: ends[end].wait(names[0], 0).times for end, names in others.items()}
        self._clear()
        return [
            {
                "move": number,
                "at": "source" if end == source else "destination",
                "copying_ms": (until - begin) * 1e3,
                "gaps": len(slowdowns),
                "slowdown": fmean(slowdowns),
            }
            for number, (source, begin, until) in enumerate(windows)
            for end in ends
            if (slowdowns := list(slowed(times[end], begin, until)))
        ]

    def _move(self, name: str, here: Remote, there: Remote, mode: str) -> dict[str, Any]:
        report: dict[str, Any] = here.call("migrate", name, there.name, mode)
        if report["state"] != "committed":
            raise RuntimeError(f"{name} stayed: {report['reason']}, {report['detail']}")
        return report

    def _clear(self) -> None:
        for one in (self._a, self._b):
            one.call("clear")

    def _name(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}"

    def _prompt(self, tokens: int) -> list[int]:
        drawn = np.random.default_rng(next(self._numbers)).integers(0, self._vocabulary, tokens)
        return [int(token) for token in drawn]


def judged(moved: Sequence[Story], stays: Story, controls: Sequence[Story]) -> dict[str, int]:
    """`wrong`: moved streams that differ from the one that stays where its controls don't.

    `differ`: those that differ from it anywhere; `controls_differ`: the same of streams that stay;
    `certain`: tokens that all that stay have in common.
    """
    certain = min(stays.common(one) for one in controls)
    return {
        "wrong": sum(one.common(stays) < min(certain, len(one.tokens)) for one in moved),
        "differ": sum(one.common(stays) < len(one.tokens) for one in moved),
        "controls_differ": sum(one.common(stays) < len(stays.tokens) for one in controls),
        "certain": certain,
    }


def told(came: dict[str, Came]) -> Story:
    """came: at each engine."""
    events = sorted(
        (when, end, token, logprob)
        for end, one in came.items()
        for when, token, logprob in zip(one.times, one.tokens, one.logprobs, strict=True)
    )
    gaps = [
        ((later[0] - sooner[0]) * 1e3, later[1] != sooner[1]) for sooner, later in pairwise(events)
    ]
    return Story(
        [event[2] for event in events],
        [event[3] for event in events],
        median(gap for gap, switched in gaps if not switched),
        [gap for gap, switched in gaps if switched],
    )


def _copied(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians: the pause in its parts, and the rate of the copies before it."""
    pauses = [report["downtime_ms"] for report in reports]
    rates = [report["bytes"] / 1e9 / copying_s(report) for report in reports]
    parts = {name: median(one[name] or 0.0 for one in pauses) for name in PAUSE_PARTS}
    return {"live_parts_ms": parts, "live_gb_s": median(rates)}


def copying_s(report: dict[str, Any]) -> float:
    """From the beginning to the pause."""
    pause = sum(report["downtime_ms"][part] or 0.0 for part in PAUSE_PARTS)
    return max(1e-6, (float(report["total_ms"]) - float(pause)) / 1e3)


def slowed(times: Sequence[float], begin: float, until: float) -> Iterator[float]:
    """Each gap in the middle of which copies ran, over the median of those just before."""
    gaps = list(pairwise(times))
    before = [later - sooner for sooner, later in gaps if later <= begin][-QUIET:]
    for sooner, later in gaps:
        if before and begin <= (sooner + later) / 2 <= until:
            yield (later - sooner) / median(before)
