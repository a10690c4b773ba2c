"""What the plugin costs where it is installed and not wanted: vLLM without KVMIG, beside vLLM that
does not load kvmig's plugin at all.

start: a new Python that imports vLLM's loader of plugins and runs it, as `vllm serve` and each of
  its processes do: the seconds of both, and of the loader alone.
step: three processes with an engine each, which take turns: `with` has loaded kvmig's plugin,
  `without` and `again` have not. Seconds a step of a batch of eight that decodes.

Of each pair the ratio counts, `with` over `without`; the order turns. `noise` is the same ratio of
`again` over `without`, which differ in nothing. vLLM's own plugins, which
import all of it, are loaded nowhere: a start would be their time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
print("answer", ended - began, ended - found)
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
TARGETS: dict[str, report.Target] = {
    f"{what}_ratio": {"min": 0.98, "max": 1.02} for what in ("start", "step")
}
LONG_RUN = tuple(TARGETS)


def environment(arm: str, folder: Path) -> dict[str, str]:
    """Of a process of that arm. folder: with the entry point, on the path of all."""
    kept = {name: value for name, value in os.environ.items() if name != SWITCH}
    return {
        **kept, **plain_environment(),
        "PYTHONPATH": f"{folder}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": OURS if arm == "with" else "",
    }  # fmt: skip


def turns(pairs: int) -> list[tuple[str, ...]]:
    """The order of the arms in each pair: each is the first, the second and the last as often."""
    return [(*ARMS[n % 3 :], *ARMS[: n % 3]) for n in range(pairs)]


def start_once(arm: str, folder: Path) -> dict[str, float]:
    """Seconds of a new process."""
    done = subprocess.run(
        [sys.executable, "-c", START, arm],
        env=environment(arm, folder), capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    whole, loader = map(float, line.split()[1:])
    return {"s": whole, "loader_s": loader}


class EngineProcess:
    """A process with an engine, which decodes when it is asked to."""

    def __init__(self, arm: str, folder: Path, model: Path) -> None:
        self._arm = arm
        self._folder = folder
        self._model = str(model)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> EngineProcess:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ENGINE, self._arm, self._model, str(BATCH), str(STEPS)),
            env=environment(self._arm, self._folder),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
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

    async def step_s(self) -> float:
        """Seconds a step of one batch. Raises RuntimeError where the process has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return float(await self._answer())

    async def _answer(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            while line := (await self._process.stdout.readline()).decode():
                if line.startswith(MARK):
                    return line.removeprefix(MARK).strip()
        raise RuntimeError(f"the engine {self._arm} ended: {await self._process.wait()}")


async def steps(pairs: int, folder: Path, model: Path) -> list[dict[str, Any]]:
    """Step times of all arms, in turn."""
    samples: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            arm: await stack.enter_async_context(EngineProcess(arm, folder, model)) for arm in ARMS
        }
        for number, order in enumerate(turns(pairs)):
            for arm in order:
                seconds = await engines[arm].step_s()
                samples.append({"what": "step", "pair": number, "arm": arm, "s": seconds})
    return samples


def starts(pairs: int, folder: Path) -> list[dict[str, Any]]:
    """Start times of all arms, in turn; the first find caches cold and are dropped."""
    for arm in ARMS:
        start_once(arm, folder)
    return [
        {"what": "start", "pair": number, "arm": arm, **start_once(arm, folder)}
        for number, order in enumerate(turns(pairs))
        for arm in order
    ]


def ratios(samples: Sequence[dict[str, Any]], what: str, arm: str) -> list[float]:
    """Of each pair: the arm's seconds over those of `without`."""
    found = {(one["pair"], one["arm"]): one["s"] for one in samples if one["what"] == what}
    return [s / found[pair, "without"] for (pair, one), s in found.items() if one == arm]


def summarise(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of the ratios with the quartiles of the noise, and milliseconds."""
    summary: dict[str, float] = {}
    for what in ("start", "step"):
        noise = ratios(samples, what, "again")
        low, _, high = quantiles(noise, n=4)
        summary |= {
            f"{what}_pairs": len(noise),
            f"{what}_ratio": median(ratios(samples, what, "with")),
            f"{what}_noise": median(noise),
            f"{what}_noise_quartile_1": low,
            f"{what}_noise_quartile_3": high,
        }
        for arm in ARMS[:2]:
            times = [one for one in samples if one["what"] == what and one["arm"] == arm]
            summary[f"{what}_{arm}_ms"] = median(one["s"] for one in times) * 1e3
            if what == "start":
                summary[f"loader_{arm}_ms"] = median(one["loader_s"] for one in times) * 1e3
    return summary


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--model", default="count", help="count, llama-1b-kv or another of --model")
    root.add_argument("--pairs", type=int, help="100, or 3 with --quick")
    options = root.parse_args(argv)
    if PACED.fullmatch(options.model):
        root.error(f"--model is {options.model}, must be one that computes its steps")
    pairs = options.pairs or (3 if options.quick else 100)
    settings = {"model": options.model, "pairs": pairs, "batch": BATCH, "steps": STEPS}
    result = report.begin("plugin_pairs", settings)
    model = model_folder(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        folder = entry_point(Path(scratch))
        report.say("starts")
        result.samples += starts(pairs, folder)
        report.say("steps")
        result.samples += asyncio.run(steps(pairs, folder, model))
    result.summary, result.targets = summarise(result.samples), dict(TARGETS)
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
