"""What `kvmig model evaluate` says that a model takes of the host's memory, beside what it takes.

A fleet on this machine's CPU gets one small model after another, each of another family, and some
once more with other flags. Each is evaluated before it starts, and then gets calls that fill its KV
cache, its largest step and its sampler. The most that its instance's process has taken, as the
kernel counts it (VmHWM), is compared to what was said. The first model's figure is assumed; the
fleet learns from each for the next ones. The KV cache counts whole in a claim, so it is small. A
second start (`--starts 2`) shows what the fleet says of a model that has run. A family that this
machine's vLLM can't serve is noted with the reason. The file is written after each family.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench import report
from bench.report import Result
from kvmig.core.errors import StartupError
from kvmig.fleet.device_claims import KV_FLAG, size_in
from kvmig_tools.fleet import FleetUp
from tests.support.zoo import FAMILIES, SERVING_FLAGS, make

FLAGS = ["--enforce-eager", "--max-model-len=1216"]
QUICK = ("llama3", "gemma3", "deepseek-v2", "mamba2")
KV_LEAST = 48 << 20
KV_SPARE = 1.25
"""A cache beyond one request of the model's whole length."""
PROMPT = 1100
"""Tokens."""
LEAST_CALLS, MOST_CALLS, AT_ONCE = 16, 40, 8
WHOLE, WHOLE_PROMPT = 32, 500
"""Calls at once whose prompts a step takes whole, and their tokens."""
SAMPLED, SAMPLED_PROMPT = 128, 16
"""Calls at once that draw their tokens, and their prompts' tokens: as many as a step takes."""
DRAWN = 16
"""Tokens of their answers: the last of these calls have come before the first have ended."""
SMALLER: dict[str, str] = {
    "llama3": "--max-num-seqs=32",
    "deepseek-v2": "--max-num-batched-tokens=512",
    "mamba2": "--max-num-batched-tokens=512",
    "qwen3-next": "--max-num-batched-tokens=512",
}
"""Families that start again with a smaller step."""
ROOMIER: dict[str, str] = {"llama3": f"{KV_FLAG}=300M"}
"""Families that start again with a KV cache that has a block for each request of the largest step:
the one with a large vocabulary."""
SETTLE_S = 15.0
"""Time for an instance to look at its memory once more."""
WITHIN = 0.1
LONG_RUN = ("before its first start: most too low",)
"""The first family goes by what is assumed of the machine; among four it decides."""
"""Aim of what is said, against the measured peak."""
CALL_S = 300.0
"""Time for a call, with the start of its model."""
PATH = "/v1/completions"


def rows_of(fleet: FleetUp) -> list[dict[str, Any]]:
    """Rows of the instances of the deployment that runs."""
    for path in fleet.sockets():
        try:
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(path), verify=False), base_url="http://x"
            ) as it:
                rows: list[dict[str, Any]] = it.get("/kvmig/v1/instances").json()["data"]
                return rows
        except httpx.ConnectError:  # of one that has ended
            continue
    return []


def peak_of(pid: int) -> int:
    """The most bytes that a process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no VmHWM")


async def fill(fleet: FleetUp, model: str, calls: int) -> None:
    """Let it answer calls, some at once. Raises StartupError with what the fleet says."""
    bodies = [
        {"model": model, "prompt": [7 + one] * PROMPT, "max_tokens": 2} for one in range(calls)
    ]
    drawn = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "ignore_eos": True}
    drawn["max_tokens"] = DRAWN
    short = [
        {"model": model, "prompt": [7 + one] * SAMPLED_PROMPT, **drawn} for one in range(SAMPLED)
    ]
    whole = [
        {"model": model, "prompt": [7 + one] * WHOLE_PROMPT, "max_tokens": 2}
        for one in range(WHOLE)
    ]
    groups = [bodies[first : first + AT_ONCE] for first in range(0, calls, AT_ONCE)]
    async with fleet.client() as client:
        client.timeout = httpx.Timeout(CALL_S)
        for some in (*groups, whole, short):
            for answer in await asyncio.gather(*(client.post(PATH, json=body) for body in some)):
                if answer.is_error:
                    raise StartupError(f"{model}: {answer.text}")


def evaluated(fleet: FleetUp, spec: dict[str, Any]) -> dict[str, Any]:
    """What the fleet says before a start. Raises StartupError with why it can't be said."""
    answer = fleet.ask("POST", "evaluate", spec)
    if answer.is_error:
        raise StartupError(answer.text)
    found: dict[str, Any] = answer.json()
    return found


def named(family: str) -> str:
    """A name that a fleet takes."""
    return family.replace(".", "-")


def kind_of(more: str) -> str:
    """The beginning of a name, by the further flag."""
    if not more:
        return ""
    return "roomy-" if more.startswith(KV_FLAG) else "small-"


def once(fleet: FleetUp, family: str, folder: Path, name: str, more: str = "") -> dict[str, Any]:
    """Evaluate, start, ask, measure and end it. more: a further flag."""
    flags = [*FLAGS, *SERVING_FLAGS.get(family, ()), *([more] if more else [])]
    spec: dict[str, Any] = {"name": name, "source": f"path:{folder}", "flags": flags}
    sizes = evaluated(fleet, spec)
    given = size_in(more.removeprefix(f"{KV_FLAG}=")) if more.startswith(KV_FLAG) else 0
    kv = given or max(KV_LEAST, int(KV_SPARE * sizes["request_bytes"]))
    spec["flags"] = [*flags, f"--kv-cache-memory-bytes={kv}"]
    found = evaluated(fleet, spec)
    if not found["host"]["fits"]:
        raise StartupError(found["why"])
    fleet.add(spec)
    calls = kv // (sizes["token_bytes"] * PROMPT) if sizes["token_bytes"] else 0
    try:
        asyncio.run(fill(fleet, name, min(MOST_CALLS, max(LEAST_CALLS, calls))))
        time.sleep(SETTLE_S)
        (row,) = rows_of(fleet)
        said, peak = found["host"]["need_bytes"], peak_of(row["pid"])
    finally:
        fleet.ask("POST", f"models/{name}/switch", {"on": False}).raise_for_status()
        fleet.until(f"models/{name}", state="zero")
    return {
        "family": family,
        "more": more,
        "said_mib": said >> 20,
        "rest_basis": found["rest_basis"],
        "peak_mib": peak >> 20,
        "off": said / peak - 1,
        "weights_mib": found["weights_bytes"] >> 20,
        "kv_mib": kv >> 20,
        "beside_kv_mib": row["beside_kv"] >> 20,
    }


def starts_of(
    fleet: FleetUp, family: str, data: Path, starts: int, more: str = ""
) -> Iterator[dict[str, Any]]:
    """The family's starts, or why one could not be. more: a further flag."""
    folder = make(family, data)
    for start in range(1, starts + 1):
        name = f"{named(family)}-{kind_of(more)}{start}"
        try:
            yield {"start": start, **once(fleet, family, folder, name, more)}
        except (StartupError, httpx.HTTPError, TimeoutError) as error:
            yield {"start": start, "family": family, "more": more, "failed": str(error)[-1000:]}
            return


def summarise(result: Result) -> None:
    """Add the figures of the samples that are there."""
    measured = [one for one in result.samples if "off" in one]
    first = [one["off"] for one in measured if one["start"] == 1]
    kinds = {
        "before its first start": [
            one["off"] for one in measured if one["start"] == 1 and not one["more"]
        ],
        "with a smaller step": [one["off"] for one in measured if kind_of(one["more"]) == "small-"],
        "with blocks for all requests": [
            one["off"] for one in measured if kind_of(one["more"]) == "roomy-"
        ],
        "by its own first start": [one["off"] for one in measured if one["start"] == 2],
    }
    for known, off in kinds.items():
        if off:
            result.summary[f"{known}: most too high"] = max(off)
            result.summary[f"{known}: most too low"] = min(off)
            within = sum(abs(one) <= WITHIN for one in off)
            result.summary[f"{known}: within 10 %"] = float(within)
            result.summary[f"{known}: models"] = float(len(off))
            result.targets[f"{known}: most too high"] = {"max": WITHIN}
            result.targets[f"{known}: most too low"] = {"min": -WITHIN}
    if first:
        result.summary["by what is assumed"] = first[0]
    failed = sum("failed" in one for one in result.samples)
    result.summary["models that said to fit and failed"] = float(failed)
    result.targets["models that said to fit and failed"] = {"max": 0}


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument(
        "--families",
        type=lambda text: tuple(text.split(",")),
        help=f"families, in this order (default: all; {', '.join(QUICK)} with --quick)",
    )
    root.add_argument("--starts", type=int, default=1, help="starts of each family (%(default)s)")
    options = root.parse_args(argv)
    families = options.families or (QUICK if options.quick else tuple(FAMILIES))
    smaller = {} if options.quick else {one: SMALLER[one] for one in families if one in SMALLER}
    roomier = {} if options.quick else {one: ROOMIER[one] for one in families if one in ROOMIER}
    settings = {
        "families": list(families), "smaller": smaller, "roomier": roomier, "flags": FLAGS,
    }  # fmt: skip
    result = report.begin("model_memory", settings)
    with tempfile.TemporaryDirectory() as data, FleetUp(Path(data)) as fleet:
        planned = [(one, options.starts, "") for one in families]
        planned += [(one, 1, more) for one, more in (*smaller.items(), *roomier.items())]
        for family, starts, more in planned:
            for row in starts_of(fleet, family, Path(data), starts, more):
                result.samples.append(row)
                report.say(json.dumps(row))
            summarise(result)
            report.keep(result, options)
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
