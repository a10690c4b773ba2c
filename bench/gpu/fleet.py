"""A fleet of two models on one GPU: `a` goes to zero when it is idle, `b` is parked.

cold: a client asks a model that isn't there; the seconds to its first token, and the parts of the
instance's start. parked: the same of one that sleeps, with the GPU's bytes that it has then and
while it serves. It needs a vLLM that kvmig supports, with CUDA; without vLLM it is skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.gpu.device import Deadline, note_gpu, options_of
from bench.gpu.serving import missing, skipped, write
from bench.report import Result, begin, finish, say, table
from kvmig.core.errors import KvmigError

MOST_S = 200.0
COLD, PARKED = 3, 4
"""Starts of `a`, and times that `b` wakes."""
ON_GPU = ("--max-model-len=8192", "--kv-cache-memory-bytes=4G")
ON_CPU = (
    "--enforce-eager", "--block-size=32", "--dtype=float32", "--max-model-len=2048",
    "--max-num-seqs=4", "--kv-cache-memory-bytes=64M",
)  # fmt: skip
TARGETS = {"wrong": {"max": 0.0}, "parked ttft_s": {"max": 1.0}, "restarts": {"max": 0.0}}


def measure(result: Result, options: argparse.Namespace) -> None:
    """Into the result, whose file is written after each row. Raises KvmigError or OSError."""
    from bench.cold import once, to_zero
    from bench.models import model_folder
    from kvmig_tools.fleet import FleetUp

    settings = result.settings
    deadline = Deadline(MOST_S)
    source = f"path:{model_folder(settings['model']).absolute()}"
    spec = {"source": source, "flags": settings["flags"]}

    def take(what: str, row: dict[str, Any]) -> None:
        result.samples.append({**row, "what": what})
        say(f"{what}: {row['ttft_s']:.2f} s to the first token")
        summarise(result)
        write(result, options)

    with tempfile.TemporaryDirectory() as data, FleetUp(Path(data)) as fleet:
        fleet.add({**spec, "name": "a"})
        fleet.add({**spec, "name": "b", "warm": "parked", "instances": {"zero_after_s": 1.0}})
        take("a, first of the fleet", asyncio.run(once(fleet, "a")))
        for _ in range(settings["cold"] - 1):
            to_zero(fleet, "a")
            take("a, cold", asyncio.run(once(fleet, "a")))
            if deadline.over(result):
                return
        take("b, cold", asyncio.run(once(fleet, "b")))
        starts = fleet.get("status")["starts"]
        for _ in range(settings["parked"]):
            serving = bytes_of(fleet, "b")
            fleet.until("models/b", state="parked")
            parked = {"serving_bytes": serving, "parked_bytes": bytes_of(fleet, "b")}
            take("b, parked", {**asyncio.run(once(fleet, "b")), **parked})
            result.summary["restarts"] = float(fleet.get("status")["starts"] - starts)
            write(result, options)
            if deadline.over(result):
                return


def bytes_of(fleet: Any, model: str) -> int:
    """Of GPUs, that the model's instances use now, as NVML reports it; 0 without a GPU."""
    from kvmig.process.nvml import read_devices

    pids = {row["pid"] for row in fleet.instances(model)}
    devices = read_devices({}).devices
    return sum(one.used or 0 for gpu in devices for one in gpu.processes if one.pid in pids)


def summarise(result: Result) -> None:
    """Medians of what is there."""
    found = result.samples
    cold = [one["ttft_s"] for one in found if one["what"].endswith("cold")]
    parked = [one for one in found if one["what"] == "b, parked"]
    result.summary |= {"wrong": float(sum(not one["right"] for one in found))}
    if result.settings["model"] != "count":  # what a random model says is as good for a clock
        result.summary["wrong"] = 0.0
    if cold:
        result.summary["cold ttft_s"] = median(cold)
    if parked:
        result.summary |= {
            "parked ttft_s": median(one["ttft_s"] for one in parked),
            "serving GiB": median(one["serving_bytes"] for one in parked) / (1 << 30),
            "parked GiB": median(one["parked_bytes"] for one in parked) / (1 << 30),
        }


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    on_gpu = options.device == "cuda"
    quick = options.quick or not on_gpu
    settings: dict[str, Any] = {
        "device": options.device,
        "model": "count" if quick else "qwen3-0.6b",
        "cold": 1 if quick else COLD,
        "parked": 1 if quick else PARKED,
        "flags": list(ON_GPU if on_gpu else ON_CPU),
    }
    result = begin("gpu fleet", settings)
    note_gpu(result)
    if reason := missing():
        return skipped(result, options, reason)
    result.targets = dict(TARGETS) if on_gpu else {"wrong": TARGETS["wrong"]}
    failed = False
    try:
        measure(result, options)
    except (KvmigError, RuntimeError, OSError, httpx.HTTPError) as error:
        failed = True
        result.samples.append({"failed": f"{type(error).__name__}: {error}"})
        say(str(error))
    names = ("what", "ttft_s", "imports_s", "weights_s", "compile_s", "memory_s", "graphs_s",
             "warm_up_s", "total_s")  # fmt: skip
    rows = [tuple(one.get(name, "") for name in names) for one in result.samples if "what" in one]
    columns = (
        "",
        "first token",
        *(name.removesuffix("_s").replace("_", "-") for name in names[2:]),
    )
    shown = table("two models of a fleet on one GPU, s", columns, rows)
    return finish(result, options, [shown]) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
