"""One server under many streams: what it delivers, how late, and what it takes for that."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load import process
from bench.load.drive import Driver
from bench.load.latency import delays_s, quantile
from bench.load.orders import GetLog, Log, SetRate
from bench.load.sites import Setup, Site

IN_FLIGHT = 64
"""Calls at once while streams are being opened."""
WATCHED = 200
"""Streams of which it is noted when each token comes."""
REST_S, REST_AT_MOST_S = 1.5, 60.0
"""After a rate what is on its way still may come: until nothing has for so long."""
BODY = {
    "model": "count",
    "prompt": "a prompt of some words, as short ones are in a chat",
    "max_tokens": 8000,
    "stream": True,
    "ignore_eos": True,
    "temperature": 0,
}
ROLES = ("front_ends", "scheduler", "stubs")


@dataclass(frozen=True)
class Plan:
    """streams; offered: tokens a second of all of them, in this order; seconds of each rate
    that pass before it is measured, and that are measured."""

    streams: int
    offered: tuple[int, ...]
    settle_s: float
    measure_s: float


@dataclass
class Sample:
    """One server at one rate. Processor time in cores, memory of front ends."""

    server: str
    front_ends: int
    round: int
    offered: int
    delivered: float
    """Tokens a second."""
    tokens_per_event: float
    added_ms_p50: float
    added_ms_p99: float
    front_us_per_token: float
    front_cores: float
    scheduler_cores: float
    stubs_cores: float
    client_cores: float
    kib_per_stream: float
    """After this rate, over the memory before the streams."""
    opened: dict[str, float] = field(default_factory=dict)
    """How the streams were opened: a second, processor time and memory of each."""


def run(setup: Setup, plan: Plan, number: int, logs: Path) -> list[Sample]:
    """All rates at a server that is started for it."""
    log = logs / f"{setup.server}-{setup.front_ends}-{number}"
    with Site(setup, log) as site, Driver(site.port, logs / "client") as client:
        warm(client)
        memory = process.pss_bytes(site.front_ends)
        opened = _open(site, client, plan, memory)
        samples: list[Sample] = []
        for offered in plan.offered:
            sample = _sample(site, client, plan, offered)
            sample.round, sample.opened = number, opened
            taken = process.pss_bytes(site.front_ends) - memory
            sample.kib_per_stream = taken / plan.streams / 1024
            samples.append(sample)
        return samples


def warm(client: Driver) -> None:
    """Some calls, so that nothing is there for the first time later."""
    client.ask("open", streams=50, watched=0, in_flight=8, body={**BODY, "max_tokens": 1})
    client.ask("close")


def _open(site: Site, client: Driver, plan: Plan, memory: int) -> dict[str, float]:
    before = process.cpu_s(site.front_ends)
    told = client.ask("open", streams=plan.streams, watched=WATCHED, in_flight=IN_FLIGHT, body=BODY)
    return {
        "streams_per_s": plan.streams / told["seconds"],
        "front_ms_per_stream": (process.cpu_s(site.front_ends) - before) / plan.streams * 1e3,
        "kib_per_stream": (process.pss_bytes(site.front_ends) - memory) / plan.streams / 1024,
    }


def _sample(site: Site, client: Driver, plan: Plan, offered: int) -> Sample:
    pids: dict[str, list[int]] = {role: getattr(site, role) for role in ROLES}
    site.orders.give(SetRate(offered / plan.streams))
    client.ask("measure", seconds=plan.settle_s)
    before = {role: process.cpu_s(those) for role, those in pids.items()}
    began = time.monotonic()
    told = client.ask("measure", seconds=plan.measure_s)
    spent = {role: process.cpu_s(those) - before[role] for role, those in pids.items()}
    seconds = time.monotonic() - began
    log = site.orders.give(GetLog())
    assert isinstance(log, Log)
    site.orders.give(SetRate(0))
    client.ask("quiet", seconds=REST_S, at_most=REST_AT_MOST_S)
    delays = delays_s(log, told["seen"])
    return Sample(
        server=site.setup.server,
        front_ends=site.setup.front_ends,
        round=0,
        offered=offered,
        delivered=told["tokens"] / told["seconds"],
        tokens_per_event=told["tokens"] / max(1, told["events"]),
        added_ms_p50=quantile(delays, 0.5) * 1e3,
        added_ms_p99=quantile(delays, 0.99) * 1e3,
        front_us_per_token=spent["front_ends"] / max(1, told["tokens"]) * 1e6,
        front_cores=spent["front_ends"] / seconds,
        scheduler_cores=spent["scheduler"] / seconds,
        stubs_cores=spent["stubs"] / seconds,
        client_cores=told["client_cpu"],
        kib_per_stream=0.0,
    )


def client_limit(plan: Plan, port: int, rate: float, logs: Path) -> dict[str, Any]:
    """What the client reads of a server that only writes, at a rate no front end comes near."""
    with (logs / "blaster").open("wb") as log:
        blaster = process.start("bench.load.blaster", port, rate, log=log)
    try:
        time.sleep(1.0)
        with Driver(port, logs / "client") as client:
            client.ask("open", streams=plan.streams, watched=0, in_flight=IN_FLIGHT, body=BODY)
            client.ask("measure", seconds=plan.settle_s)
            told = client.ask("measure", seconds=plan.measure_s)
    finally:
        process.end(blaster)
    return {
        "server": "client alone",
        "offered": rate,
        "delivered": told["tokens"] / told["seconds"],
        "client_cores": told["client_cpu"],
    }
