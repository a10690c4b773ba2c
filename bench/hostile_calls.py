"""What a client's stream feels of one hostile call, and what the call holds of a front end.

A real vLLM instance behind the real HTTP server. One client streams; beside it another process
sends a body made to hurt, of many kinds (`bench.hostile_bodies`), each twice: as large as somebody
sends it, and as large as the front end lets it through. Of each: the stream's longest gap from the
first byte of the call until its answer and half a second longer; the same beside an ordinary call
just before; the answer's status; and by how much the memory of the process that serves grew at
most. Prompts are computed in parts of 64 tokens, so that no prompt of a call, hostile or not, makes
the engine's steps much longer; the engine has one thread, as its steps on a GPU need one core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import uvloop

from bench import report
from bench.arrivals import longest_ms
from bench.client import Stream, prompt_of, session
from bench.hostile_bodies import HostileCall, hostile_calls, ordinary_call
from bench.models import NAMES, model_flags, model_folder
from bench.site import SETTLE
from kvmig_tools.served import Served

FLAGS = (
    "--enforce-eager", "--block-size=32", "--max-num-seqs=64", "--instances=1",
    "--shutdown-timeout=2", "--max-num-batched-tokens=64",
)  # fmt: skip
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""An engine on a CPU with a thread on each core waits in each step for the core that a client, or
another process, has: the gap would be the machine's, not the call's."""
AFTER_S = 0.5
TIMEOUT_S = 90.0
SAMPLE_S = 0.02
TOKENS = 100_000
RATIO = 3.0
LONG_RUN = ("ratio_max",)
"""It compares two single gaps in one run, and chance makes the largest of 80."""
HELD_MB = 100.0


@dataclass(frozen=True)
class Sample:
    """One hostile call. Times in milliseconds, sizes in MB. status: 0: no answer in time."""

    kind: str
    size: str
    path: str
    body_mb: float
    status: int
    answer_ms: float
    quiet_ms: float
    longest_ms: float
    grown_mb: float


def send(port: int, path: str, file: str) -> tuple[int, str]:
    """In a process of its own: status and beginning of the answer; 0: none came."""
    body = Path(file).read_bytes()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with contextlib.suppress(OSError):  # it has hung up, and may have answered
        connection.request("POST", path, body, {"content-type": "application/json"})
    try:
        answer = connection.getresponse()
        return answer.status, answer.read(300).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()


class Memory:
    """Of the processes that serve the port."""

    def __init__(self, served: Served) -> None:
        assert served.process is not None
        launcher = psutil.Process(served.process.pid)
        every = [launcher, *launcher.children(recursive=True)]
        self._of = [one for one in every if served.port in _listens(one)]

    def now(self) -> list[int]:
        """Bytes of each."""
        return [one.memory_info().rss for one in self._of]


def _listens(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections("tcp") if one.status == "LISTEN"}


class Bench:
    """A server, a stream that runs, and who sends beside it."""

    def __init__(
        self, served: Served, stream: Stream, pool: ProcessPoolExecutor, file: Path
    ) -> None:
        self._served = served
        self._stream = stream
        self._pool = pool
        self._file = file
        self._memory = Memory(served)

    async def beside(self, call: HostileCall) -> tuple[int, str, float, float, float]:
        """Status and beginning of the answer, its time, the longest gap (ms), growth (MB)."""
        self._file.write_bytes(call.body)
        await asyncio.sleep(AFTER_S)  # what has come meanwhile is read
        before = self._memory.now()
        peak = list(before)
        began = time.monotonic()
        sent = asyncio.get_running_loop().run_in_executor(
            self._pool, send, self._served.port, call.path, str(self._file)
        )
        ends = None
        while ends is None or time.monotonic() < ends:
            await asyncio.sleep(SAMPLE_S)
            peak = [max(pair) for pair in zip(peak, self._memory.now(), strict=True)]
            if sent.done() and ends is None:
                ends = time.monotonic() + AFTER_S
        status, said = sent.result()
        answer_ms = (ends - AFTER_S - began) * 1e3
        gap = longest_ms(self._stream.arrivals, began, ends)
        last = self._stream.arrivals[-1].at
        gap = max(gap, (ends - max(last, began)) * 1e3)
        grown = max(most - least for most, least in zip(peak, before, strict=True)) / 1e6
        return status, said, answer_ms, gap, grown

    async def sample(self, call: HostileCall, ordinary: HostileCall) -> Sample:
        """The gap beside an ordinary call, then beside this one."""
        quiet = max([(await self.beside(ordinary))[3] for _ in range(2)])
        status, said, answer_ms, gap, grown = await self.beside(call)
        one = Sample(
            call.kind, call.size, call.path, round(len(call.body) / 1e6, 3), status,
            round(answer_ms, 1), round(quiet, 2), round(gap, 2), round(grown, 1),
        )  # fmt: skip
        report.say(
            f"{one.kind}, {one.size} ({one.body_mb} MB): {status}, {gap:.0f} ms beside {quiet:.0f},"
            f" +{grown:.0f} MB, answered in {answer_ms:.0f} ms  {said[:150]!r}"
        )
        return one


async def measure(
    served: Served, calls: Callable[[], Iterator[HostileCall]], runs: int, context: int, logs: Path
) -> list[Sample]:
    """All samples. calls: of one run. context: of the model, in tokens."""
    samples: list[Sample] = []
    ordinary = ordinary_call(served.model)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        async with session() as http_session:
            for number in range(runs):
                for call in calls():
                    prompt = prompt_of(16, number, call.kind, call.size)
                    stream = Stream(http_session, served.url, served.model, prompt, context - 64)
                    async with stream:
                        await stream.reach(SETTLE)
                        bench = Bench(served, stream, pool, logs / "body")
                        await bench.beside(ordinary)
                        samples.append(await bench.sample(call, ordinary))
    return samples


def calls_of(model: str, options: argparse.Namespace) -> Iterator[HostileCall]:
    """Those that the flags pick; of a quick run the largest that are let through."""
    words = options.only.split(",")
    for call in hostile_calls(
        model, options.context, lambda kind: any(one in kind for one in words)
    ):
        if call.size == "fits" or not options.quick:
            yield call


def worst(samples: list[Sample]) -> list[Sample]:
    """Of each kind and size the run with the longest gap, with the most memory of all."""
    found: dict[tuple[str, str], list[Sample]] = {}
    for one in samples:
        found.setdefault((one.kind, one.size), []).append(one)
    return [
        Sample(**{
            **asdict(max(of, key=lambda one: one.longest_ms)),
            "quiet_ms": max(one.quiet_ms for one in of),
            "grown_mb": max(one.grown_mb for one in of),
        })
        for of in found.values()
    ]  # fmt: skip


def summarise(samples: list[Sample]) -> dict[str, float]:
    """The figures."""
    every = worst(samples)
    return {
        "kinds": len({one.kind for one in every}),
        "quiet_ms": max(one.quiet_ms for one in every),
        "longest_ms": max(one.longest_ms for one in every),
        "ratio_max": max(one.longest_ms / one.quiet_ms for one in every),
        "ratio_median": median(one.longest_ms / one.quiet_ms for one in every),
        "grown_mb_max": max(one.grown_mb for one in every),
        "unanswered": sum(not one.status for one in every),
    }


def markdown(samples: list[Sample]) -> str:
    """The table of docs/security.md: a row for each kind, huge and as large as is let through."""
    found: dict[str, dict[str, Sample]] = {}
    for one in worst(samples):
        found.setdefault(one.kind, {})[one.size] = one
    lines = [
        "| too much of | huge | answer | gap (ordinary) | memory"
        " | largest let through | answer | gap (ordinary) | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {kind} | {_cells(of['huge'])} | {_cells(of['fits'])} |" for kind, of in found.items()
    ]
    return "\n".join(lines) + "\n"


def _cells(one: Sample) -> str:
    status = one.status or f"none in {TIMEOUT_S:.0f} s"
    gap = f"{one.longest_ms:.0f} ({one.quiet_ms:.0f}) ms"
    return f"{_size(one.body_mb)} | {status} | {gap} | +{one.grown_mb:.0f} MB"


def _size(megabytes: float) -> str:
    return f"{megabytes:.1f} MB" if megabytes >= 0.1 else f"{megabytes * 1e3:.0f} kB"


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--model", default="count", help=f"{', '.join(NAMES)} or a folder")
    root.add_argument("--context", type=int, default=8192, help="--max-model-len")
    root.add_argument(
        "--runs",
        type=int,
        help="of all kinds: 3, or 1 with --quick, which sends only what is let through",
    )
    root.add_argument("--only", default="", help="kinds that have one of these words, A,B,...")
    root.add_argument("--table", type=Path, help="write docs/security.md's table there")
    options = root.parse_args(argv)
    if options.quick and options.table is not None:
        root.error(f"--table is {options.table}, must be left out with --quick: it has both sizes")
    runs = options.runs or (1 if options.quick else 3)
    flags = [*FLAGS, f"--max-model-len={options.context}", *model_flags(options.model)]
    flags += ["--num-gpu-blocks-override", str(2 * options.context // 32 + 600)]
    settings: dict[str, Any] = {"model": options.model, "runs": runs, "flags": flags}
    result = report.begin("hostile_calls", settings)
    with tempfile.TemporaryDirectory() as logs:
        model = model_folder(options.model)
        log = Path(logs) / "log"
        with Served(flags, model=model, environment=ONE_THREAD, log=log) as served:
            calls = partial(calls_of, served.model, options)
            samples = uvloop.run(measure(served, calls, runs, options.context, Path(logs)))
    result.samples = [asdict(one) for one in samples]
    result.summary = summarise(samples)
    result.targets = {
        "ratio_max": {"max": RATIO}, "grown_mb_max": {"max": HELD_MB}, "unanswered": {"max": 0},
    }  # fmt: skip
    if options.table is not None:
        options.table.write_text(markdown(samples))
    rows = [
        (one.kind, one.size, one.body_mb, one.status, one.longest_ms, one.quiet_ms, one.grown_mb)
        for one in worst(samples)
    ]
    columns = ("kind", "size", "MB", "status", "longest", "quiet", "grown MB")
    return report.finish(result, options, [report.table("Milliseconds", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
