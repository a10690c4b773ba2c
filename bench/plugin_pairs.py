"""What the plugin costs where it is installed and not wanted: vLLM without KVMIG, beside vLLM that
does not load kvmig's plugin at all.

loader: a process that has imported what vLLM imports before it loads plugins is forked, and the
  fork runs vLLM's loader. A start takes seconds, of which the plugin can change milliseconds: 100
  pairs of whole starts would take half an hour and show less. The imports are the same code in all
  arms, so their seconds, from the whole starts below, are added to both sides of a pair: that is
  `start_ratio`. plugin_ms: what the plugin adds to each process that loads it.
whole_start: a few pairs of new Pythons that import and run the loader, as `vllm serve` and each of
  its processes do.
step: three processes with an engine each, which stay up and take turns: `with` has loaded kvmig's
  plugin, `without` and `again` have not. Seconds a step of a batch of eight that decodes.

Of each pair the ratio counts, `with` over `without`; the order turns. `noise` is the same ratio of
`again` over `without`, which differ in nothing. vLLM's own plugins, which import all of it, are
loaded nowhere: a start would be their time. Python keeps what it compiles, as it does where vLLM is
installed. With --out the samples are in the file from the first pair on, also of a run that is
interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import report
from bench.models import PACED, model_folder
from bench.overhead import plain_environment
from kvmig.plugin import SWITCH
from kvmig_tools.plugin_entry import entry_point

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("without", "with", "again")
OURS = "kvmig"
TIMEOUT_S = 300.0
MARK = "answer "
START = """
import time
began = time.perf_counter()
from vllm.plugins import load_general_plugins
found = time.perf_counter()
load_general_plugins()
ended = time.perf_counter()
import sys
assert ("kvmig.plugin" in sys.modules) == (sys.argv[1] == "with")
print("answer", ended - began, found - began)
"""
FORKS = """
import os, sys, time
from vllm.plugins import load_general_plugins
print("answer ready", flush=True)
for arm in map(str.strip, sys.stdin):
    os.environ["VLLM_PLUGINS"] = "kvmig" if arm == "with" else ""
    if (child := os.fork()) == 0:
        began = time.perf_counter()
        load_general_plugins()
        took = time.perf_counter() - began
        right = ("kvmig.plugin" in sys.modules) == (arm == "with")
        if right:
            print("answer", took, flush=True)
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
"""
STEPS = 64
BATCH = 8
ENGINE = """
import sys, time
from vllm.plugins import load_general_plugins
load_general_plugins()
assert ("kvmig.plugin" in sys.modules) == (sys.argv[1] == "with")
from vllm import LLM, SamplingParams
llm = LLM(
    model=sys.argv[2], enforce_eager=True, block_size=32, max_num_seqs=16, dtype="float32",
    num_gpu_blocks_override=600, enable_prefix_caching=False, distributed_executor_backend="uni",
)
batch, steps = map(int, sys.argv[3:])
prompts = [{"prompt_token_ids": [32 + n, 48, 49]} for n in range(batch)]
asked = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=0)
for _ in range(2):
    llm.generate(prompts, asked, use_tqdm=False)
print("answer ready", flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    llm.generate(prompts, asked, use_tqdm=False)
    print("answer", (time.perf_counter() - began) / steps, flush=True)
"""
WHOLE_STARTS = 10
"""Pairs of these in a whole run."""
QUICK = 3
TARGETS: dict[str, report.Target] = {
    f"{what}_ratio": {"min": 0.98, "max": 1.02} for what in ("start", "step")
}
LONG_RUN = tuple(TARGETS)
Samples = list[dict[str, Any]]
Keep = Callable[[Samples], None]
"""Takes the samples of a pair as soon as there are all."""


def environment(arm: str, folder: Path) -> dict[str, str]:
    """Of a process of that arm. folder: with the entry point, on the path of all."""
    kept = {name: value for name, value in os.environ.items() if name != SWITCH}
    return {
        **kept, **plain_environment(),
        "PYTHONPATH": f"{folder}:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": OURS if arm == "with" else "",
    }  # fmt: skip


def turns(pairs: int) -> list[tuple[str, ...]]:
    """The order of the arms in each pair: each is the first, the second and the last as often."""
    return [(*ARMS[n % 3 :], *ARMS[: n % 3]) for n in range(pairs)]


class AskedProcess:
    """A Python program that answers each line which it gets; it ends with its input."""

    def __init__(self, program: str, words: Sequence[str], environment: dict[str, str]) -> None:
        self._command = (sys.executable, "-c", program, *words)
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> AskedProcess:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            await self._answer()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def seconds(self, line: str = "") -> float:
        """What it answers to that line. Raises RuntimeError where the process has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        return float(await self._answer())

    async def _answer(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            while line := (await self._process.stdout.readline()).decode():
                if line.startswith(MARK):
                    return line.removeprefix(MARK).strip()
        raise RuntimeError(f"a process that is measured ended: {await self._process.wait()}")


def start_once(arm: str, folder: Path) -> dict[str, float]:
    """Seconds of a new process; imports_s: until the loader runs."""
    done = subprocess.run(
        [sys.executable, "-c", START, arm],
        env=environment(arm, folder), capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    whole, imports = map(float, line.split()[1:])
    return {"s": whole, "imports_s": imports}


def whole_starts(pairs: int, folder: Path, keep: Keep) -> None:
    """Start times of all arms, in turn; the first find caches cold and are dropped."""
    for arm in ARMS:
        start_once(arm, folder)
    for number, order in enumerate(turns(pairs)):
        keep([
            {"what": "whole_start", "pair": number, "arm": arm, **start_once(arm, folder)}
            for arm in order
        ])  # fmt: skip


async def loaders(pairs: int, folder: Path, keep: Keep) -> None:
    """Times of the loader in all arms, in turn; the first of each is dropped."""
    async with AskedProcess(FORKS, (), environment("without", folder)) as forks:
        for arm in ARMS:
            await forks.seconds(arm)
        for number, order in enumerate(turns(pairs)):
            keep([
                {"what": "loader", "pair": number, "arm": arm, "s": await forks.seconds(arm)}
                for arm in order
            ])  # fmt: skip


async def steps(pairs: int, folder: Path, model: Path, keep: Keep) -> None:
    """Step times of all arms, in turn."""
    words = (str(model), str(BATCH), str(STEPS))
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, AskedProcess] = {}
        for arm in ARMS:
            one = AskedProcess(ENGINE, (arm, *words), environment(arm, folder))
            engines[arm] = await stack.enter_async_context(one)
        for number, order in enumerate(turns(pairs)):
            keep([
                {"what": "step", "pair": number, "arm": arm, "s": await engines[arm].seconds()}
                for arm in order
            ])  # fmt: skip


def seconds_of(samples: Samples, what: str, arm: str) -> list[float]:
    """By pair."""
    return [one["s"] for one in samples if one["what"] == what and one["arm"] == arm]


def ratios(samples: Samples, what: str, arm: str, more_s: float = 0.0) -> list[float]:
    """Of each pair: the arm's seconds over those of `without`. more_s: that both take besides."""
    pairs = zip(seconds_of(samples, what, arm), seconds_of(samples, what, "without"), strict=True)
    return [(more_s + one) / (more_s + other) for one, other in pairs]


def spread(samples: Samples, what: str, name: str, more_s: float = 0.0) -> dict[str, float]:
    """The median of the ratios, beside the noise and its quartiles."""
    noise = ratios(samples, what, "again", more_s)
    low, _, high = quantiles(noise, n=4)
    return {
        f"{name}_pairs": len(noise),
        f"{name}_ratio": median(ratios(samples, what, "with", more_s)),
        f"{name}_noise": median(noise),
        f"{name}_noise_quartile_1": low,
        f"{name}_noise_quartile_3": high,
    }


def summarise(samples: Samples) -> dict[str, float]:
    """The figures."""
    imports_s = median(one["imports_s"] for one in samples if one["what"] == "whole_start")
    summary = {
        **spread(samples, "loader", "start", imports_s),
        **spread(samples, "whole_start", "whole_start"),
        **spread(samples, "step", "step"),
        "imports_ms": imports_s * 1e3,
    }
    for what in ("loader", "step"):
        for arm in ARMS:
            summary[f"{what}_{arm}_ms"] = median(seconds_of(samples, what, arm)) * 1e3
    without = seconds_of(samples, "loader", "without")
    for name, arm in (("plugin_ms", "with"), ("plugin_noise_ms", "again")):
        pairs = zip(seconds_of(samples, "loader", arm), without, strict=True)
        summary[name] = median(one - other for one, other in pairs) * 1e3
    return summary


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--model", default="count", help="count, llama-1b-kv or another of --model")
    root.add_argument("--pairs", type=int, help=f"100, or {QUICK} with --quick")
    options = root.parse_args(argv)
    if PACED.fullmatch(options.model):
        root.error(f"--model is {options.model}, must be one that computes its steps")
    pairs = options.pairs or (QUICK if options.quick else 100)
    whole = min(pairs, WHOLE_STARTS)
    settings = {"model": options.model, "pairs": pairs, "whole_starts": whole, "batch": BATCH,
                "steps": STEPS}  # fmt: skip
    result = report.begin("plugin_pairs", settings)

    def keep(samples: Samples) -> None:
        result.samples += samples
        report.keep(result, options)

    model = model_folder(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        folder = entry_point(Path(scratch))
        report.say("whole starts")
        whole_starts(whole, folder, keep)
        report.say("loaders")
        asyncio.run(loaders(pairs, folder, keep))
        report.say("steps")
        asyncio.run(steps(pairs, folder, model, keep))
    result.summary, result.targets = summarise(result.samples), dict(TARGETS)
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
