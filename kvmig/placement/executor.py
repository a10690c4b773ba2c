"""`python -m kvmig.placement.executor --to placement.toml --deployment chat=http://...`: from where
instances are to where a placement has them, while they serve.

It looks, plans, gives the orders of one wave, waits until they are done, and looks again: if
something fails or changes meanwhile, the next plan begins with what is. Killed at any moment it
leaves orders that go on by themselves, and another start of it goes on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import httpx
import msgspec

from kvmig.core.api_records import InstanceRow, RequestRow
from kvmig.core.config import MigrationConfig
from kvmig.core.errors import ConfigError, KvmigError, StartupError
from kvmig.core.order_fence import PROGRAM_TOKEN, TOKEN_HEADER
from kvmig.core.secret import ADMIN_KEY
from kvmig.placement.file import UnitPlacement, read
from kvmig.placement.learned import LearnedMigration, as_many_as, drains, mean, requests_s, step_s
from kvmig.placement.moves import Leases, PlanRefused, PlanStep, PlanWave, Slot, placed, plan
from kvmig.placement.observed import ObservedPlacement, check, leaving, observed, unfinished
from kvmig.placement.starts import InstanceStart, own_flags, tenths
from kvmig.placement.told import wave_to_text, way_to_text

ADMIN = "/kvmig/v1"
LOOK_S = 0.1
"""Pause between two looks at what the deployments do."""
REPORTS = 200
"""Migrations that are looked at."""
ORDER_S = 40.0
"""Timeout of an answer: a launcher may read an engine's flags first."""
FAILURES = 5
"""Failures in a row until it gives up."""
AFTER_FAILURE_S = 1.0
PATIENCE_S = 300.0
"""Timeout of a wave, and of instances that neither serve nor leave."""


Listed = TypeVar("Listed")
Answer = TypeVar("Answer")


class ReplaceFailed(KvmigError):
    """The placement was not reached; instances are where they are, and serve."""


class ExecutorSettings(NamedTuple):
    """What is known of times; starts and drains are measured meanwhile."""

    start_s: dict[str, float]
    """Seconds of a start, by deployment."""
    drain_s: float = 1.5
    """Seconds of a drain of an instance without requests."""
    request_s: float = 0.5
    """Seconds of a drain for each request, where a deployment reports neither drains nor steps."""
    bandwidth: float = 1e9
    """Bytes of KV cache a second that leave an instance."""
    patience_s: float = PATIENCE_S
    nodes: Mapping[int, str] = MappingProxyType({})
    """Ids of Ray nodes, by their numbers in the placement; none: deployments are on one host."""
    workers: Mapping[str, str] = MappingProxyType({})
    """Ids of the Ray nodes of a fleet's workers, by their names in the placement."""
    gpus: Mapping[str, Sequence[str]] = MappingProxyType({})
    """UUIDs of the GPUs that workers have taken from Ray for units, by unit."""


class CompletedWave(NamedTuple):
    """A wave that is over."""

    wave: PlanWave
    began: float
    """Time of the beginning, by `time.monotonic`."""
    seconds: float


class DeploymentClient:
    """The admin API of one `kvmig.serve`. Make it inside a running event loop; `close` it."""

    def __init__(
        self,
        name: str,
        at: str,
        key: str = "",
        units: Mapping[str, str] | None = None,
        token: Callable[[], Mapping[str, str]] = dict,
        unanswered: Callable[[], None] = lambda: None,
        settle: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """at: http://HOST:PORT, or the path of its Unix socket. key: of its admin API. units: of
        instances that say none. token: the headers of orders that are decided by what is seen now,
        see `kvmig.core.order_fence`. unanswered: called when it is not known whether an order was
        carried out. settle: awaited before each look at the instances; after it, no order from
        before is carried out any more. Raises StartupError."""
        self.name = name
        self._units = units or {}
        self._token = token
        self._unanswered = unanswered
        self._settle = settle
        self._seen_with = token()
        """The token of the last look at the instances."""
        path = at.startswith("/")
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=at if path else None, verify=at[:5] == "https"),
            base_url="http://deployment" if path else at.rstrip("/"),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=ORDER_S,
        )

    async def close(self) -> None:
        """Disconnect."""
        await self._http.aclose()

    async def check_lead(self) -> None:
        """Raise ConfigError where the deployment takes no orders with this token, as a server of a
        fleet has given some; and ReplaceFailed where it doesn't answer."""
        try:
            events = self._http.stream("GET", f"{ADMIN}/events", headers=dict(self._token()))
            async with events as answer:
                if answer.is_error:
                    why = (await answer.aread()).decode(errors="replace")
                    raise ConfigError(f"deployment {self.name} takes no orders: {why:.300}")
        except httpx.HTTPError as error:
            raise ReplaceFailed(f"deployment {self.name} doesn't answer: {error!r}") from error

    async def rows(self) -> list[InstanceRow]:
        """The deployment's instances. Raises ReplaceFailed."""
        if self._settle is not None:
            try:
                await self._settle()
            except StartupError as error:
                raise ReplaceFailed(f"deployment {self.name}: {error}") from error
        self._seen_with = self._token()
        return [
            row if row.unit else msgspec.structs.replace(row, unit=self._units.get(row.id, ""))
            for row in await self._listed("/instances", InstanceRow)
        ]

    async def moved(self) -> list[LearnedMigration]:
        """The deployment's last migrations. Raises ReplaceFailed."""
        return await self._listed("/migrations", LearnedMigration, limit=REPORTS)

    async def step_s(self) -> float | None:
        """Mean seconds between two tokens; None: it is not reported. Raises ReplaceFailed."""
        answer = await self._answer("GET", "/metrics")
        return None if answer.is_error else step_s(answer.text)

    async def start(self, start: InstanceStart) -> None:
        """Raises ReplaceFailed with the deployment's error message."""
        await self._ask("POST", "/instances", json=msgspec.to_builtins(start))

    async def drain_instance(self, instance: str, *, last: bool = False, now: bool = False) -> None:
        """Drain an instance and end it. Raises ReplaceFailed with the deployment's message."""
        flags = {"last": str(last).lower(), "now": str(now).lower()}
        await self._ask("DELETE", f"/instances/{instance}", params=flags)

    async def guarantee(self, instance: str, size: int) -> None:
        """Guarantee an instance bytes of its unit's KV cache. Raises ReplaceFailed."""
        await self._ask("PATCH", f"/instances/{instance}", json={"guarantee_bytes": size})

    async def requests(self) -> list[RequestRow]:
        """The deployment's live requests. Raises ReplaceFailed."""
        return await self._listed("/requests", RequestRow)

    async def move(self, request: str, destination: str) -> bool:
        """Whether the request has moved; one that ends before, or stays, has not."""
        body = {"request_id": request, "destination": destination}
        answer = await self._answer("POST", f"{ADMIN}/migrations", json=body)
        return not answer.is_error and answer.json().get("state") == "committed"

    async def _listed(self, path: str, kind: type[Listed], **params: object) -> list[Listed]:
        answer = await self._ask("GET", path, params=params)
        try:
            return msgspec.convert(answer.json()["data"], list[kind])  # type: ignore[valid-type]
        except (ValueError, LookupError, TypeError, msgspec.MsgspecError) as error:
            raise ReplaceFailed(f"deployment {self.name}: no kvmig.serve: {error!r}") from error

    async def _ask(self, method: str, path: str, **more: object) -> httpx.Response:
        answer = await self._answer(method, f"{ADMIN}{path}", **more)
        if answer.is_error:
            try:
                why = str(answer.json()["error"]["message"])
            except (ValueError, LookupError, TypeError):
                why = f"status {answer.status_code}"
            raise ReplaceFailed(f"deployment {self.name}: {why}")
        return answer

    async def _answer(self, method: str, path: str, **more: object) -> httpx.Response:
        own, is_known = dict(self._seen_with), method == "GET"
        try:
            answer = await self._http.request(method, path, headers=own, **more)  # type: ignore[arg-type]
            is_known = is_known or not answer.is_server_error
        except httpx.HTTPError as error:
            raise ReplaceFailed(f"deployment {self.name} doesn't answer: {error!r}") from error
        finally:
            if not is_known:
                self._unanswered()
        return answer


class PlacementExecutor:
    """One placement for some deployments."""

    def __init__(
        self,
        placement: UnitPlacement,
        deployments: Mapping[str, DeploymentClient],
        settings: ExecutorSettings,
        tell: Callable[[str], None],
        *,
        by_name: bool = False,
    ) -> None:
        """by_name: units are what the placement names so; else one that is like another may stand
        for it."""
        self._by_name = by_name
        self._placement = placement
        self._deployments = deployments
        self._settings = settings
        self._tell = tell
        self._units = {one.called: one for one in placement.units}
        self._target: Leases | None = None
        self._shares: dict[Slot, float] = {}
        """Shares of the SMs for steps with decodes only, with which instances start."""
        self._moved: dict[str, list[LearnedMigration]] = {}
        """The last migrations of each deployment, as of the last plan."""
        self.emptied_s: list[float] = []
        """Seconds that drains took besides their requests."""
        self.done: list[CompletedWave] = []

    async def run(self) -> None:
        """Work until the placement is reached. Raises ConfigError or ReplaceFailed."""
        failures = 0
        while True:
            before = len(self.done)
            try:
                if not await self._wave():
                    return
            except ReplaceFailed as failed:
                failures = failures + 1 if len(self.done) == before else 1
                self._tell(f"{failed}; the next plan follows")
                if failures >= FAILURES:
                    raise ReplaceFailed(f"given up after {failures} failures: {failed}") from failed
                await asyncio.sleep(AFTER_FAILURE_S)

    async def waves(self) -> list[PlanWave]:
        """What would be done now. Raises ConfigError or ReplaceFailed."""
        return await self._planned(await self._settled())

    async def _wave(self) -> bool:
        """One more; False: nothing is left to do."""
        seen = await self._settled()
        waves = await self._planned(seen)
        if not waves:
            return False
        wave = waves[0]
        self._tell(wave_to_text(len(self.done) + 1, wave).strip())
        began = time.monotonic()
        try:
            await _all_of(self._order(one, seen) for one in wave.steps)
        except ReplaceFailed:
            await self._settled()  # some of them may have begun
            raise
        await self._over(wave, seen.instances, began)
        self.done.append(CompletedWave(wave, began, time.monotonic() - began))
        self._tell(f"  took {self.done[-1].seconds:.1f} s")
        return True

    async def _planned(self, seen: ObservedPlacement) -> list[PlanWave]:
        settings = self._settings
        site = self._placement.site(settings.start_s, await self._byte_s(seen))._replace(
            drain_s=mean(self.emptied_s, settings.drain_s), bandwidth=settings.bandwidth
        )
        if self._target is None:  # once: units that are alike keep the names they get here
            wanted = self._placement.leases()
            named = wanted if self._by_name else placed(site, seen.leases, wanted)
            self._shares = {slot: lease.share for slot, lease in named.items()}
            # An instance has the share that it was started with: no order changes it.
            self._target = {slot: lease._replace(share=1.0) for slot, lease in named.items()}
        waves = plan(site, seen.leases, self._target)
        if isinstance(waves, PlanRefused):
            raise (ReplaceFailed if self.done else ConfigError)(waves.why)
        return waves

    async def _byte_s(self, seen: ObservedPlacement) -> dict[str, float]:
        """What each model's requests' handshakes take in a drain."""
        self._moved = await self._each(DeploymentClient.moved)
        known = {name: drains(moved) for name, moved in self._moved.items()}
        steps = {} if any(known.values()) else await self._each(DeploymentClient.step_s)
        at_once = MigrationConfig().max_migrations
        each_s = requests_s(known, steps, at_once, self._settings.request_s)
        used, requests = Counter[str](), Counter[str]()
        for slot, lease in seen.leases.items():
            used[slot[0]] += lease.used
            requests[slot[0]] += as_many_as([seen.requests[slot]], at_once)
        return {name: each_s[name] * requests[name] / max(1, used[name]) for name in each_s}

    async def _settled(self) -> ObservedPlacement:
        """Look until every instance serves; those that were given up are taken out."""
        deadline = time.monotonic() + self._settings.patience_s
        while True:
            seen = observed(self._placement, await self._rows())
            for name, instance in seen.failed:
                await self._deployments[name].drain_instance(instance, now=True)
            if not seen.unsettled and not seen.failed:
                return seen
            if time.monotonic() > deadline:
                raise ReplaceFailed(f"still so: {seen.unsettled}")
            await asyncio.sleep(LOOK_S)

    async def _rows(self) -> dict[str, list[InstanceRow]]:
        return await self._each(DeploymentClient.rows)

    async def _each(
        self, ask: Callable[[DeploymentClient], Awaitable[Answer]]
    ) -> dict[str, Answer]:
        """What each deployment answers."""
        answers = await asyncio.gather(*map(ask, self._deployments.values()))
        return dict(zip(self._deployments, answers, strict=True))

    async def _order(self, step: PlanStep, seen: ObservedPlacement) -> None:
        at = self._deployments[step.model]
        match step.kind:
            case "start":
                share = self._shares.get((step.model, step.unit), 1.0)
                asks = any(one.decode_share for one in seen.sharing(step.model))
                unit = self._units[step.unit]
                own = own_flags(self._placement, step.model, len(unit.gpus), step.quota)
                node = self._settings.nodes.get(unit.node, "") if unit.gpus else ""
                node = self._settings.workers.get(unit.worker, node)
                gpus = [] if node else [str(gpu) for gpu in unit.gpus]
                gpus = list(self._settings.gpus.get(step.unit, gpus))
                percent = tenths(share) if asks else None
                await at.start(InstanceStart(step.unit, gpus, own, percent, node))
            case "drain" | "gap":
                instance = seen.instances[step.model, step.unit]
                await at.drain_instance(instance, last=step.kind == "gap")
            case "quota":
                await at.guarantee(seen.instances[step.model, step.unit], step.quota)
            case "move":
                await self._move(step, seen)

    async def _move(self, step: PlanStep, seen: ObservedPlacement) -> None:
        """Move requests. Raises ReplaceFailed where none could move: it would be planned without
        end."""
        at, used = self._deployments[step.model], seen.leases[step.model, step.unit].used
        source = seen.instances[step.model, step.unit]
        left = await at.requests()
        moves: list[Awaitable[bool]] = []
        at_once = asyncio.Semaphore(MigrationConfig().max_migrations)

        async def move(request: str, to: str) -> bool:
            async with at_once:
                return await at.move(request, to)

        for unit, size in step.to:
            chosen = leaving(left, source, used, size)
            left = [one for one in left if one.id not in chosen]
            moves += [move(one, seen.instances[step.model, unit]) for one in chosen]
        if not any(await _all_of(moves)):
            raise ReplaceFailed(f"no request of {step.model} could leave {step.unit}")

    async def _over(self, wave: PlanWave, instances: Mapping[Slot, str], began: float) -> None:
        """Wait until all steps are; learn how long starts take. Raises ReplaceFailed."""
        left = list(wave.steps)
        while left:
            rows = await self._rows()
            failed = [(name, one) for name, listed in rows.items()
                      for one in listed if one.state == "failed"]  # fmt: skip
            if failed:
                name, row = failed[0]
                raise ReplaceFailed(f"instance {row.id} of {name} can't start: {row.detail}")
            for one in list(left):
                if not list(unfinished([one], instances, rows)):
                    left.remove(one)
                    took_s = time.monotonic() - began
                    if one.kind == "start":
                        self._settings.start_s[one.model] = took_s
                    elif one.kind == "drain":
                        await self._emptied(one.model, instances[one.model, one.unit], took_s)
            if left and time.monotonic() - began > self._settings.patience_s:
                raise ReplaceFailed(f"still so: {'; '.join(unfinished(left, instances, rows))}")
            await asyncio.sleep(LOOK_S if left else 0)

    async def _emptied(self, name: str, instance: str, took_s: float) -> None:
        """Learn what a drain took besides its requests, for the next plan."""
        before = {one.id for one in self._moved[name]}
        fresh = [one for one in await self._deployments[name].moved()
                 if one.source == instance and one.id not in before]  # fmt: skip
        moving_s = sum(one.seconds for one in drains(fresh))
        self.emptied_s.append(max(0.0, took_s - moving_s))


async def _all_of(orders: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """The answers of orders, once none is on its way any more. Raises the first error."""
    answers = await asyncio.gather(*orders, return_exceptions=True)
    found: list[Answer] = []
    for one in answers:
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found


# -- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for what can't be used or has no way, 1 for what failed on the way."""
    args = parser().parse_args(argv)
    try:
        return asyncio.run(_run(args))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except ReplaceFailed as error:
        print(error, file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser("python -m kvmig.placement.executor", description=__doc__)
    add = flags.add_argument
    add("--to", type=Path, required=True, metavar="FILE.toml", help="the placement to reach")
    add(
        "--deployment",
        action="append",
        required=True,
        metavar="NAME=URL",
        help="where the model NAME of the placement is served: http://HOST:PORT, or the path of a "
        f"Unix socket; {ADMIN_KEY} is sent where it is set; may be given several times",
    )
    add(
        "--start",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="how long an instance of it takes to start (10 each, until one was measured)",
    )
    add(
        "--drain",
        type=float,
        default=1.5,
        help="seconds of a drain without requests (1.5, until one was measured)",
    )
    add(
        "--request",
        type=float,
        default=0.5,
        help="seconds of a drain for each of its requests (what the deployments' last drains took; "
        "0.5 where there is none and engines don't report how long their steps are)",
    )
    add(
        "--bandwidth",
        type=float,
        default=1e9,
        help="bytes of KV cache that leave an instance per second, waits included (1e9)",
    )
    add(
        "--node",
        action="append",
        default=[],
        metavar="NUMBER=ID",
        help="id of the Ray node that has this number in the placement, for deployments with --ray"
        " (`ray list nodes`); may be given several times",
    )
    add("--dry-run", action="store_true", help="print the waves; change nothing")
    return flags


async def _run(args: argparse.Namespace) -> int:
    where = f"--to {args.to}"
    try:
        placement = read(args.to.read_text(encoding="utf-8"), where)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} can't be read: {error}") from error
    named = _named("--deployment", args.deployment, "URL")
    for name, url in named.items():
        if not url.startswith(("http://", "https://", "/")):
            raise ConfigError(
                f"--deployment is {name}={url!r:.100}, must be NAME=http://HOST:PORT or NAME=/PATH"
            )
    nodes = _nodes(args.node)
    check(placement, list(named), where, nodes)
    for flag in ("--drain", "--request", "--bandwidth"):
        value = getattr(args, flag.removeprefix("--"))
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{flag} is {value:g}, must be a number above 0")
    start_s = dict.fromkeys(named, 10.0) | _seconds(args.start, named)
    key = os.environ.get(ADMIN_KEY, "")
    token = {TOKEN_HEADER: str(PROGRAM_TOKEN)}
    deployments = {
        name: DeploymentClient(name, url, key, token=lambda: token) for name, url in named.items()
    }
    try:
        it = PlacementExecutor(
            placement,
            deployments,
            ExecutorSettings(start_s, args.drain, args.request, args.bandwidth, nodes=nodes),
            lambda line: print(line, flush=True),
        )
        if args.dry_run:
            print(way_to_text(await it.waves()))
            return 0
        for one in deployments.values():
            await one.check_lead()
        began = time.monotonic()
        await it.run()
        print(f"the placement is reached, after {time.monotonic() - began:.1f} s")
        return 0
    finally:
        for one in deployments.values():
            await one.close()


def _named(flag: str, given: Sequence[str], what: str) -> dict[str, str]:
    """Parse NAME=VALUE. Raises ConfigError."""
    found: dict[str, str] = {}
    for words in given:
        name, equals, value = words.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{flag} is {words!r:.100}, must be NAME={what}")
        if name in found:
            raise ConfigError(f"{flag} is {words!r:.100}, but {name} was given before")
        found[name] = value
    return found


def _nodes(given: Sequence[str]) -> dict[int, str]:
    """Parse NUMBER=ID. Raises ConfigError."""
    found = _named("--node", given, "ID")
    for number in found:
        if not number.isdecimal():
            raise ConfigError(
                f"--node is {number!r:.100}=..., must be a node's number, = and an id"
            )
    return {int(number): node for number, node in found.items()}


def _seconds(given: Sequence[str], known: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in _named("--start", given, "SECONDS").items():
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not (math.isfinite(found[name]) and found[name] > 0 and name in known):
            raise ConfigError(
                f"--start is {name}={value!r:.100}, must be {' or '.join(known)}, = and seconds "
                "above 0"
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
