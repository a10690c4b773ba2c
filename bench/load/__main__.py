"""Front ends under many streams, with engines that compute nothing: what the serving part costs.

10,000 streams stay open; the engines put tokens out for all of them at a set pace, in as many
batches at different moments as there are instances. Launcher, scheduler, llumlets (with links,
messages, spans, load reports), router and HTTP server are kvmig's own, so is the front end:
vLLM's OpenAI application on vLLM's AsyncLLM. Beside it, in the same run, vLLM's own front end:
its API server with its own AsyncLLM and engine-core client, connected by its own means to a stub
of its engine core, which puts the same tokens out in the same batches, in the same words
(`bench.load.twin`, `twin_core`). The order of the two turns with each round.

Everything shares this machine's cores: front ends, engines, scheduler and the client, whose own
limit is measured first. `delivered`: tokens a second that the client has read; `added`: from the
moment a token is made to the one the client has read it; `front us`: processor time of the front
ends for a token delivered; memory: PSS of the front ends over that before the streams.
At a rate that is more than a front end can do, vLLM puts tokens that wait into one event
(`tokens an event`), and what is added grows as long as the rate lasts.
"""

from __future__ import annotations

import math
import resource
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench import report
from bench.load.plot import draw
from bench.load.rounds import Plan, Sample, client_limit, run
from bench.load.sites import Setup
from kvmig.process.sockets import free_port

FULL = Plan(10_000, (10_000, 20_000, 50_000), settle_s=5.0, measure_s=10.0)
QUICK = Plan(500, (2_000, 5_000), settle_s=2.0, measure_s=4.0)
INSTANCES = 10
CLIENT_RATE = 100_000
SERVERS = ("kvmig", "vllm", "kvmig-transformers")
SPARE_DESCRIPTORS = 500


def setups(front: str, front_ends: Sequence[int], number: int) -> list[Setup]:
    """Of one round. front: of kvmig; vllm's comes with its twin, whose turn is first or last."""
    servers = ["kvmig", "vllm"] if front == "vllm" else ["kvmig-transformers"]
    return [
        Setup(server, count, INSTANCES)
        for count in front_ends
        for server in (servers if number % 2 == 0 else reversed(servers))
    ]


def summarise(samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, report.Target]]:
    """Medians over the rounds; ratios are made in each round."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    by_place = {(one.server, one.front_ends, one.round, one.offered): one for one in samples}
    for one in samples:
        at = f"{one.server}_{one.front_ends}"
        found[f"{at}.delivered_at_{one.offered}"].append(one.delivered)
        found[f"{at}.added_ms_p50_at_{one.offered}"].append(one.added_ms_p50)
        found[f"{at}.added_ms_p99_at_{one.offered}"].append(one.added_ms_p99)
        found[f"{at}.front_us_per_token_at_{one.offered}"].append(one.front_us_per_token)
        found[f"{at}.scheduler_cores_at_{one.offered}"].append(one.scheduler_cores)
        found[f"{at}.kib_per_stream_after_{one.offered}"].append(one.kib_per_stream)
        found[f"{at}.kib_per_stream_opened"].append(one.opened["kib_per_stream"])
        found[f"{at}.front_ms_per_request"].append(one.opened["front_ms_per_stream"])
        twin = by_place.get(("vllm", one.front_ends, one.round, one.offered))
        if one.server == "kvmig" and twin is not None:
            over = f"kvmig_over_vllm_{one.front_ends}"
            found[f"{over}.delivered_at_{one.offered}"].append(one.delivered / twin.delivered)
            found[f"{over}.front_us_per_token_at_{one.offered}"].append(
                one.front_us_per_token / twin.front_us_per_token
            )
    summary = {name: median(values) for name, values in found.items()}
    targets: dict[str, report.Target] = {
        name: {"min": 0.95} for name in summary if "over_vllm" in name and "delivered" in name
    }
    return {name: value for name, value in summary.items() if not math.isnan(value)}, targets


def tables(samples: Sequence[Sample]) -> list[Table]:
    """Two lines for each server and rate."""
    given = [
        (
            f"{one.server}, {one.front_ends}", one.offered, one.delivered, one.tokens_per_event,
            one.added_ms_p50, one.added_ms_p99,
        )
        for one in samples
    ]  # fmt: skip
    taken = [
        (
            f"{one.server}, {one.front_ends}", one.offered, one.front_us_per_token,
            one.front_cores, one.scheduler_cores, one.stubs_cores, one.client_cores,
            one.kib_per_stream,
        )
        for one in samples
    ]  # fmt: skip
    who = "server, front ends"
    return [
        report.table(
            "What clients get: tokens a second, and milliseconds added",
            (who, "offered", "delivered", "an event", "p50", "p99"),
            given,
        ),
        report.table(
            "What it takes: front ends' time a token, cores, KiB a stream",
            (who, "offered", "front us", "front", "sched.", "engines", "client", "KiB"),
            taken,
        ),
    ]


def streams_that_fit(wanted: int) -> int:
    """As far as this machine lets a process have open files; raises its own limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard - SPARE_DESCRIPTORS)


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--front", default="vllm", help="kvmig's HTTP server: vllm or transformers")
    root.add_argument("--front-ends", default="", help="how many at once, e.g. 1,2 (the default)")
    root.add_argument("--streams", type=int, help="instead of 10,000")
    root.add_argument("--rounds", type=int, help="instead of 2")
    options = root.parse_args(argv)
    given: Plan = QUICK if options.quick else FULL
    streams = streams_that_fit(options.streams or given.streams)
    plan = Plan(streams, given.offered, given.settle_s, given.measure_s)
    usual = "1" if options.quick else "1,2"
    front_ends = [int(one) for one in (options.front_ends or usual).split(",")]
    rounds = options.rounds or (1 if options.quick else 2)
    settings: dict[str, Any] = {
        **asdict(plan), "front": options.front, "front_ends": front_ends, "rounds": rounds,
        "instances": INSTANCES,
    }  # fmt: skip
    result = report.begin("load", settings)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        report.say("the client alone")
        alone = client_limit(plan, free_port(), CLIENT_RATE, logs)
        for number in range(rounds):
            for setup in setups(options.front, front_ends, number):
                report.say(f"round {number + 1}: {setup.server}, {setup.front_ends} front ends")
                samples += run(setup, plan, number, logs)
    result.samples = [alone, *map(asdict, samples)]
    result.summary, result.targets = summarise(samples)
    result.summary["client_alone_tokens_per_s"] = alone["delivered"]
    return report.finish(result, options, tables(samples), draw)


if __name__ == "__main__":
    sys.exit(main())
