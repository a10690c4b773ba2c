"""The metrics of a whole fleet in one text: proxies', deployments', the server's own decisions.

A deployment is asked on its socket; all that it says gets the label `model`. One that doesn't
answer in time is left out, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import httpx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.devices import DeviceRecord
from kvmig.fleet.account_metrics import QuotaUse, UserCounters, of_quotas
from kvmig.fleet.controller import ModelController
from kvmig.fleet.device_metrics import of_devices, records_of
from kvmig.fleet.lifecycle import State
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.tables import StoreError
from kvmig.fleet.workers import FleetWorker, WorkerState
from kvmig.proxy.exposition import Part, merged, parsed

SCRAPE_S = 2.0
"""Timeout of a deployment's answer."""
USAGE_S = 0.5
"""Timeout of the database's answer: where it is locked, the rest is shown all the same."""
CACHE_S = 1.0
"""Time for which a text is served again."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class FleetMetrics:
    """The metrics of a fleet; make it inside a running event loop."""

    models: ModelController
    proxies: Callable[[], Iterable[str]]
    """What each has reported last."""
    usage: Callable[[str], Awaitable[Sequence[Mapping[str, Any]]]]
    """Sums over all time by a field of the ledger: model, or user."""
    clock: TimeSource = monotonic
    set_aside: Callable[[], Mapping[str, int]] = dict
    """How many records could not be read, by kind."""
    free: Callable[[], Mapping[str, int]] = dict
    """Bytes free on disks, by what is on them."""
    behind_s: Callable[[], float] = float
    """Seconds since all usage was in the ledger."""
    quotas: Callable[[], Sequence[QuotaUse]] = tuple
    _users: UserCounters = field(default_factory=UserCounters, init=False)
    _asked: dict[str, asyncio.Future[Sequence[Mapping[str, Any]]]] = field(
        default_factory=dict, init=False
    )
    """Questions to the database that have no answer yet, by field."""
    _missed: Counter[str] = field(default_factory=Counter, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _text: bytes = field(default=b"", init=False)
    _made_at: float = field(default=-CACHE_S, init=False)

    async def text(self) -> bytes:
        """The text for Prometheus; calls at the same time get the same text."""
        async with self._lock:
            if self.clock() - self._made_at >= CACHE_S:
                self._text = await self._make()
                self._made_at = self.clock()
            return self._text

    async def _make(self) -> bytes:
        every = self.models.fronts()
        usage, users = await asyncio.gather(self._used("model"), self._used("user"))
        sockets = {
            one.wanted.name: one.note.socket
            for one in every
            if one.note is not None and one.serving
        }
        texts = await asyncio.gather(*(self._scrape(*one) for one in sockets.items()))
        parts: list[Part] = [
            *(({"model": name}, text) for name, text in zip(sockets, texts, strict=True)),
            *(({}, text) for text in self.proxies()),
        ]
        own = [
            *of_models(every, self.models.claimed_by),
            *of_workers(self.models.workers.workers()),
            *of_usage(usage),
            *self._users.metrics(users),
            *of_quotas(self.quotas()),
            *of_devices(self.models.places.nodes(), self._records(), self._beside()),
            of_spools(self.behind_s()),
            self._misses(),
            of_set_aside(self.set_aside()),
            of_faults(self.models.faults.count),
            of_disks(self.free()),
        ]
        return await asyncio.to_thread(lambda: merged([own, *map(parsed, parts)]))

    def _beside(self) -> dict[str, str]:
        """The models of the second deployments of roll-outs, by these deployments' keys."""
        names = [one.wanted.name for one in self.models.every()]
        found = ((name, self.models.rollouts.beside(name)) for name in names)
        return {other.key: name for name, other in found if other is not None}

    async def _scrape(self, model: str, socket: str) -> str:
        """What a deployment says; nothing if it doesn't."""
        transport = httpx.AsyncHTTPTransport(uds=socket, verify=False)
        try:
            async with (
                asyncio.timeout(SCRAPE_S),
                httpx.AsyncClient(transport=transport, base_url="http://deployment") as client,
            ):
                answer = await client.get("/metrics", timeout=SCRAPE_S)
                return answer.raise_for_status().text
        except (httpx.HTTPError, TimeoutError) as error:
            self._missed[model] += 1
            log.warning("metrics of %s are left out: %r", model, error)
            return ""

    def _records(self) -> Mapping[str, DeviceRecord]:
        here = self.models.memory.devices.watch.inventory.devices
        return records_of(here, self.models.workers.workers())

    async def _used(self, field: str) -> Sequence[Mapping[str, Any]]:
        """Sums of the ledger; none while the database doesn't answer: it is asked once until then,
        however many texts are made."""
        asked = self._asked.get(field)
        if asked is None:
            asked = self._asked[field] = asyncio.ensure_future(self.usage(field))
        done, _ = await asyncio.wait([asked], timeout=USAGE_S)
        if not done:
            log.warning("metrics of usage are left out: no answer within %g s", USAGE_S)
            return ()
        del self._asked[field]
        try:
            return asked.result()
        except StoreError as error:
            log.warning("metrics of usage are left out: %s", error)
            return ()

    def _misses(self) -> Metric:
        found = CounterMetricFamily(
            "kvmig_scrapes_missed",
            "Times that a model's deployment did not return its metrics in time.",
            labels=["model"],
        )
        for model, count in self._missed.items():
            found.add_metric([model], count)
        return found


def of_models(models: Iterable[ManagedModel], claimed: Callable[[str], int]) -> list[Metric]:
    """What the server sees and has decided of each. claimed: bytes of the host, by name."""
    state = GaugeMetricFamily(
        "kvmig_model_state", "1 for the state that it is in.", labels=["model", "state"]
    )
    desired = GaugeMetricFamily(
        "kvmig_model_desired", "Instances that it should have.", labels=["model"]
    )
    waits = GaugeMetricFamily(
        "kvmig_model_lacks_room",
        "1 while it would start but nothing has room for it.",
        labels=["model"],
    )
    ready = GaugeMetricFamily("kvmig_model_ready", "Instances that serve.", labels=["model"])
    claim = GaugeMetricFamily(
        "kvmig_claim_bytes", "Memory of the host that it takes.", labels=["model"]
    )
    entered = CounterMetricFamily(
        "kvmig_model_entered", "Times that it came into a state.", labels=["model", "state"]
    )
    evicted = CounterMetricFamily(
        "kvmig_model_evicted", "Times that it ended to make room.", labels=["model"]
    )
    scaled = CounterMetricFamily(
        "kvmig_autoscaler_decisions",
        "Changes of the number of instances that were decided.",
        labels=["model", "way", "reason"],
    )
    for one in models:
        name = one.wanted.name
        for each in get_args(State):
            state.add_metric([name, each], one.life.state == each)
        desired.add_metric([name], one.desired)
        ready.add_metric([name], one.ready)
        waits.add_metric([name], one.lacks_room)
        claim.add_metric([name], claimed(name))
        evicted.add_metric([name], one.evicted)
        for each, count in one.entered.items():
            entered.add_metric([name, each], count)
        for (way, reason), count in one.scaled.items():
            scaled.add_metric([name, way, reason], count)
    return [state, desired, ready, waits, claim, entered, evicted, scaled]


def of_workers(workers: Iterable[FleetWorker]) -> list[Metric]:
    """What is seen and wanted of each; none on one host."""
    state = GaugeMetricFamily(
        "kvmig_worker_state", "1 for the state that it is in.", labels=["worker", "state"]
    )
    takes = GaugeMetricFamily(
        "kvmig_worker_takes_instances",
        "1 where new instances may start: it is ready, and neither cordoned nor drained.",
        labels=["worker"],
    )
    for one in workers:
        for each in get_args(WorkerState):
            state.add_metric([one.name, each], one.state == each)
        takes.add_metric([one.name], not one.refusal)
    return [state, takes]


def of_set_aside(count: Mapping[str, int]) -> Metric:
    """What could not be read since the server's start."""
    sentence = "Records, spools, keys, users and models on disk that the server could not read."
    return _counter_of("kvmig_set_aside", sentence, "kind", count)


def of_faults(count: Mapping[str, int]) -> Metric:
    """Unforeseen errors since the server's start."""
    sentence = "Parts of the server's rounds that failed unforeseen and are tried again."
    return _counter_of("kvmig_round_faults", sentence, "part", count)


def _counter_of(name: str, sentence: str, label: str, count: Mapping[str, int]) -> Metric:
    found = CounterMetricFamily(name, sentence, labels=[label])
    for value, number in count.items():
        found.add_metric([value], number)
    return found


def of_spools(behind_s: float) -> Metric:
    """How far the ledger is behind what front ends have counted."""
    found = GaugeMetricFamily(
        "kvmig_usage_behind_seconds",
        "Time since all usage that front ends have counted was in the ledger.",
    )
    found.add_metric([], behind_s)
    return found


def of_disks(free: Mapping[str, int]) -> Metric:
    """Room for what the fleet writes."""
    found = GaugeMetricFamily(
        "kvmig_disk_free_bytes", "Free bytes of the disk that has the fleet's files.", labels=["of"]
    )
    for name, count in free.items():
        found.add_metric([name], count)
    return found


def of_usage(sums: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """Metrics of the ledger, over all time."""
    tokens = CounterMetricFamily(
        "kvmig_usage_tokens", "Tokens that were counted.", labels=["model", "kind"]
    )
    calls = CounterMetricFamily("kvmig_usage_calls", "Calls that were counted.", labels=["model"])
    for one in sums:
        calls.add_metric([one["model"]], one["calls"])
        for kind in ("prompt", "output"):
            tokens.add_metric([one["model"], kind], one[kind])
    return [tokens, calls]
