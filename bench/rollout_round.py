"""When a trainer has its devices back in a round of long-tailed answers, with and without moves.

Four real vLLM instances behind the real HTTP server; each gets as many answers, whose lengths are
drawn anew for each pair of rounds. In one round of a pair nothing moves; in the other the last
answers move onto fewer instances (`examples.rollout.pack_tail`), as soon as these have seats for
all that an instance still has. A device is free once its instance has no answer any more.

Measured: when each answer ended, and when each device was free. A round also has the trainer's
work, which any free device does, answer by answer, from the first one that has ended: its time is
computed from what was measured, for work that would take a quarter, a half and all of the time of
the answers on all devices together. The last answer takes as long with moves as without.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np
import uvloop
from numpy.random import RandomState

from bench import report
from bench.client import Stream, StreamFailed, prompt_of, session
from bench.models import NAMES, model_flags, model_folder
from examples.rollout import pack_tail
from kvmig_tools.served import Served

INSTANCES = 4
SEATS = 16
EACH = 12
"""Answers of an instance."""
SHORTEST, LONGEST, TAIL = 100, 2200, 1.1
"""Tokens of an answer, and the exponent of their Pareto law."""
SHARES = (0.25, 0.5, 1.0)
ENDED = ("finished", "unknown_request")
FLAGS = (
    "--enforce-eager",
    "--block-size=32",
    f"--max-num-seqs={SEATS}",
    "--kv-cache-memory-bytes=536870912",
    f"--instances={INSTANCES}",
    # Calls go to the instances in turn, and nothing moves by itself.
    "--policy=round-robin",
    "--shutdown-timeout=2",
)


@dataclass(frozen=True)
class Sample:
    """One round. Seconds from its begin."""

    pair: int
    moves: bool
    moved: int
    longest_tokens: int
    answers_s: float
    """Until the last answer has ended."""
    free_s: list[float]
    """When each device was free."""
    ended_s: list[float]
    tokens: list[int]

    def round_s(self, token_s: float) -> float:
        """Until the trainer's work is done, too. token_s: of it, for a token of an answer."""
        devices = list(self.free_s)
        heapq.heapify(devices)
        for ended, tokens in sorted(zip(self.ended_s, self.tokens, strict=True)):
            begin = max(ended, heapq.heappop(devices))
            heapq.heappush(devices, begin + tokens * token_s)
        return max(devices)


def lengths_of(pair: int) -> list[int]:
    """Tokens of each answer."""
    drawn = SHORTEST * (1 + RandomState(pair).pareto(TAIL, INSTANCES * EACH))
    return [int(one) for one in np.minimum(drawn, LONGEST)]


class AnswerRound:
    """One round on a server that is otherwise idle."""

    def __init__(self, served: Served, http: aiohttp.ClientSession, pair: int) -> None:
        self._url, self._model, self._http = served.url, served.model, http
        self._lengths = lengths_of(pair)
        self._prompts = [prompt_of(64, pair, number) for number in range(len(self._lengths))]
        self._places: dict[str, str] = {}
        """Where each answer that has not ended runs."""
        self._moved: set[str] = set()

    async def run(self, pair: int, moves: bool) -> Sample:
        """Answer all."""
        began = time.monotonic()
        free: dict[str, float] = {}
        ended: dict[str, float] = {}
        async with AsyncExitStack() as stack:
            waits: dict[asyncio.Task[None], str] = {}
            ids = []
            for prompt, length in zip(self._prompts, self._lengths, strict=True):
                stream = Stream(self._http, self._url, self._model, prompt, length)
                await stack.enter_async_context(stream)
                ids.append(stream.request_id)
                waits[asyncio.create_task(stream.reach(length))] = stream.request_id
            await self._locate()
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    request_id = waits.pop(task)
                    ended[request_id] = time.monotonic() - began
                    self._places.pop(request_id, None)
                if moves:
                    await asyncio.gather(*(self._move(*one) for one in self._tail()))
                for name, some in self._left().items():
                    if not some:
                        free.setdefault(name, time.monotonic() - began)
        return Sample(
            pair, moves, len(self._moved), max(self._lengths), max(ended.values()),
            [free[name] for name in sorted(free)], [ended[one] for one in ids], self._lengths,
        )  # fmt: skip

    def _tail(self) -> list[tuple[str, str, str]]:
        return pack_tail(self._left(), SEATS)

    def _left(self) -> dict[str, list[str]]:
        left: dict[str, list[str]] = {f"i{number}": [] for number in range(INSTANCES)}
        for request_id, name in self._places.items():
            left[name].append(request_id)
        return left

    async def _locate(self) -> None:
        async with self._http.get(f"{self._url}/kvmig/v1/requests") as answer:
            rows = (await answer.json())["data"]
        self._places = {str(row["call_id"]): str(row["instance"]) for row in rows}

    async def _move(self, request_id: str, source: str, destination: str) -> None:
        """Move it; one that ends meanwhile stays."""
        body = {"request_id": request_id, "destination": destination}
        async with self._http.post(f"{self._url}/kvmig/v1/migrations", json=body) as answer:
            moved = await answer.json()
        if moved.get("state") == "committed":
            self._places[request_id] = destination
            self._moved.add(request_id)
        elif moved.get("reason") not in ENDED and answer.status not in (404, 409):
            raise StreamFailed(f"{request_id} stays at {source}: {moved}")


async def measure(served: Served, pairs: int) -> list[Sample]:
    """All rounds; in every other pair the one with moves comes first."""
    samples = []
    async with session() as http:
        for pair in range(pairs):
            for moves in (bool(pair % 2), not pair % 2):
                sample = await AnswerRound(served, http, pair).run(pair, moves)
                samples.append(sample)
                report.say(
                    f"pair {pair + 1} of {pairs}, {'moves' if moves else 'no moves'}:"
                    f" answers {sample.answers_s:.1f} s, devices {sum(sample.free_s):.1f} s"
                )
    return samples


def summarise(samples: list[Sample]) -> dict[str, float]:
    """Medians over the pairs, each of a round with moves over the one without."""
    plain = {one.pair: one for one in samples if not one.moves}
    moving = {one.pair: one for one in samples if one.moves}
    summary = {
        "answers_s": median(one.answers_s for one in plain.values()),
        "answers_ratio": median(moving[n].answers_s / plain[n].answers_s for n in plain),
        "devices_s": median(sum(one.free_s) for one in plain.values()),
        "devices_ratio": median(sum(moving[n].free_s) / sum(plain[n].free_s) for n in plain),
        "devices_ratio_worst": max(sum(moving[n].free_s) / sum(plain[n].free_s) for n in plain),
        "moved": median(one.moved for one in moving.values()),
    }
    for share in SHARES:
        ratios = []
        for number, one in plain.items():
            token_s = share * INSTANCES * one.answers_s / sum(one.tokens)
            ratios.append(moving[number].round_s(token_s) / one.round_s(token_s))
        summary[f"round_ratio_work_{share:g}"] = median(ratios)
    return summary


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--model", default="device10ms", help=f"{', '.join(NAMES)} or a folder")
    root.add_argument("--pairs", type=int, help="pairs of rounds: 6, or 1 with --quick")
    options = root.parse_args(argv)
    pairs = options.pairs or (1 if options.quick else 6)
    flags = [*FLAGS, *model_flags(options.model)]
    settings = {
        "model": options.model, "pairs": pairs, "answers": INSTANCES * EACH, "flags": flags,
    }  # fmt: skip
    result = report.begin("rollout_round", settings)
    with tempfile.TemporaryDirectory() as logs:
        report.say(f"starting {INSTANCES} instances")
        model = model_folder(options.model)
        with Served(flags, model=model, log=Path(logs) / "log") as served:
            samples = uvloop.run(measure(served, pairs))
    result.samples = [asdict(one) for one in samples]
    result.summary = summarise(samples)
    result.targets = {"devices_ratio": {"max": 1.0}}
    columns = ("round", "longest answer, tokens", "answers", "devices", "moved")
    rows = [
        (
            f"{one.pair}, {'moves' if one.moves else 'no moves'}",
            one.longest_tokens, one.answers_s, sum(one.free_s), one.moved,
        )
        for one in samples
    ]  # fmt: skip
    return report.finish(result, options, [report.table("Seconds", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
