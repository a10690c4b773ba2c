"""What kvmig adds to the engine's HTTP application: admin API, metrics, ids, the gate."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.routing import Route

from kvmig.gateway.access import Access
from kvmig.gateway.admin import admin_api
from kvmig.gateway.admin_instances import instances_api
from kvmig.gateway.authentication import AuthenticationMiddleware
from kvmig.gateway.body import BodyMiddleware, Intake
from kvmig.gateway.connection import Connection
from kvmig.gateway.gate import Gate, GateState
from kvmig.gateway.inventory import InstanceRow, cluster_rows
from kvmig.gateway.launcher_link import LauncherLink
from kvmig.gateway.membership import Membership
from kvmig.gateway.metrics import (
    ClassCollector,
    InstanceCollector,
    Metrics,
    of_all_front_ends,
    with_instances,
)
from kvmig.gateway.overload import Overload
from kvmig.gateway.overload_door import Door, OverloadMiddleware
from kvmig.gateway.priorities import PriorityMiddleware
from kvmig.gateway.refusals import RefusalMiddleware, Refusals
from kvmig.gateway.request_id import RequestIdMiddleware
from kvmig.gateway.router import Router
from kvmig.ground.http import HttpConfig
from kvmig.ground.priorities import PriorityClass

MIDDLEWARE = (
    OverloadMiddleware,
    PriorityMiddleware,
    BodyMiddleware,
    Gate,
    AuthenticationMiddleware,
    RefusalMiddleware,
    RequestIdMiddleware,
)
"""Innermost first: the engine's application adds them when it is built."""


class Front:
    """One front end's additions; `metrics` observes the router."""

    def __init__(
        self,
        gate: GateState,
        priorities: Sequence[PriorityClass],
        http: HttpConfig,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.metrics = Metrics(registry, priorities)
        self._priorities = priorities
        self._gate = gate
        self._registry = registry
        self._intake = Intake(http)
        self._refusals = Refusals(registry)
        self._door = Door(Overload(http.max_waiting), refused=self.metrics.refused)
        self._read_timeout_s = http.read_timeout_s

    def attach(
        self,
        app: FastAPI,
        router: Router,
        membership: Membership,
        launcher: LauncherLink,
        model: str,
        access: Access,
    ) -> None:
        """Add everything to `app`, before it serves. Our /metrics takes the place of its own."""

        def rows() -> list[InstanceRow]:
            return cluster_rows(router.instances(), membership.members)

        app.include_router(admin_api(router, rows, model, access.admin))
        app.include_router(instances_api(launcher, rows, model, access.admin))
        source = of_all_front_ends(self._registry)
        source.register(InstanceCollector(router.instances))
        source.register(ClassCollector(router.instances, self._priorities))
        exposed = with_instances(source, router.engine_indexes)

        async def metrics(_: Request) -> Response:
            return Response(generate_latest(exposed), media_type=CONTENT_TYPE_LATEST)

        app.router.routes.insert(0, Route("/metrics", metrics))
        self._gate.vacant = router.vacant
        self._door.in_queues = router.waiting
        app.state.connection = Connection.limited(
            self._read_timeout_s, router.readers, self._refusals.count
        )
        app.state.access = access
        app.state.door = self._door
        app.state.gate = self._gate
        app.state.intake = self._intake
        app.state.refusals = self._refusals
        app.state.priorities = self._priorities
