"""What a start costs: processor time and seconds until it answers, and memory, beside plain vLLM.

One, two and three instances of the bundled model from nothing, then one more by the admin API; two
instances forked in a nursery that has loaded; in the same run vLLM's own server, which stands for
each instance that shared nothing. Processor time is that of the server, its children and forks,
since each began. Memory is proportional (PSS): shared pages count to each that has them by its
part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median

import httpx
import psutil

from bench import report
from bench.overhead import PLAIN_VLLM, plain_environment
from bench.site import ENGINE_FLAGS
from kvmig_tools.nursery import Nursery, forked_for
from kvmig_tools.served import Served

INSTANCES = (1, 2, 3)
INSTANCE = "kvmig.launcher.llumlet_main"
TIMEOUT_S = 120.0


def processes(served: Served) -> list[psutil.Process]:
    """The server, its children and what a nursery has forked for it."""
    assert served.process is not None
    root = psutil.Process(served.process.pid)
    forked = map(psutil.Process, forked_for(root.pid))
    return list({root, *root.children(recursive=True), *forked})


def cpu_s(served: Served) -> float:
    """Processor seconds so far."""
    times = [one.cpu_times() for one in processes(served)]
    return sum(one.user + one.system for one in times)


def mib(several: Sequence[psutil.Process]) -> list[float]:
    """Proportional memory of each."""
    return [one.memory_full_info().pss / (1 << 20) for one in several]


def forked() -> list[dict[str, object]]:
    """Two instances in a nursery."""
    with Nursery("vllm") as nursery:
        return started(2, nursery)


def started(instances: int, nursery: Nursery | None = None) -> list[dict[str, object]]:
    """kvmig from nothing; with two also what one more costs. nursery: or forked there."""
    began = time.monotonic()
    where = "" if nursery is None else " in a nursery"
    with Served([*ENGINE_FLAGS, f"--instances={instances}"], nursery=nursery) as served:
        up = {"ready_s": time.monotonic() - began, "cpu_s": cpu_s(served)}
        here = [one for one in processes(served) if INSTANCE in " ".join(one.cmdline())]
        rows = [{"what": f"{instances} instances{where}", **up, "pss_mib": median(mib(here))}]
        if instances == 2:
            rows.append({"what": f"one more{where}", **_one_more(served, up["cpu_s"])})
        return [dict(row) for row in rows]


def _one_more(served: Served, cpu_before: float) -> dict[str, float]:
    began = time.monotonic()
    url = f"{served.url}/kvmig/v1/instances"
    httpx.post(url, json={"count": 1}, timeout=TIMEOUT_S).raise_for_status()
    while [row["state"] for row in served.get("instances")].count("serving") < 3:
        if time.monotonic() > began + TIMEOUT_S:
            raise TimeoutError(f"the third instance was not ready in {TIMEOUT_S:g} s")
        time.sleep(0.1)
    return {"ready_s": time.monotonic() - began, "cpu_s": cpu_s(served) - cpu_before}


def plain() -> dict[str, object]:
    """vLLM's own server."""
    began = time.monotonic()
    with Served(ENGINE_FLAGS, command=PLAIN_VLLM, environment=plain_environment()) as served:
        up = {"ready_s": time.monotonic() - began, "cpu_s": cpu_s(served)}
        return {"what": "plain vLLM", **up, "pss_mib": sum(mib(processes(served)))}


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__).parse_args(argv)
    repeats = 1 if options.quick else 3
    result = report.begin("start", {"repeats": repeats, "flags": ENGINE_FLAGS})
    for number in range(repeats):
        result.samples.append(plain())
        for instances in INSTANCES:
            result.samples += started(instances)
        result.samples += forked()
        report.say(f"{number + 1} of {repeats}")
    for row in result.samples:
        for field in row.keys() - {"what"}:
            same = [one[field] for one in result.samples if one["what"] == row["what"]]
            result.summary[f"{row['what']} {field}"] = median(same)
    result.summary = dict(sorted(result.summary.items()))
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
