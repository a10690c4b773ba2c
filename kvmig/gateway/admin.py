"""The admin API under /kvmig/v1: what there is, and moving requests by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Query

from kvmig.gateway.access import Rule
from kvmig.gateway.admin_errors import PROBLEMS, Responses, guarded
from kvmig.gateway.admin_models import (
    ErrorBody,
    Instance,
    Listing,
    Migration,
    MigrationBody,
    Request,
)
from kvmig.gateway.inventory import InstanceRow
from kvmig.gateway.migrations import RECENT
from kvmig.gateway.router import Router

PREFIX = "/kvmig/v1"


def admin_api(
    router: Router,
    rows: Callable[[], Sequence[InstanceRow]],
    model: str,
    rule: Rule,
) -> APIRouter:
    """The routes, for `app.include_router`.

    rows: of all instances, now. model: the served model's name. rule: who may call them.
    """
    errors: Responses = {status: {"model": ErrorBody} for status in (400, 404, 409, 503, 504)}
    api = APIRouter(
        prefix=PREFIX,
        tags=["kvmig"],
        responses=PROBLEMS,
        route_class=guarded(rule, tuple(MigrationBody.model_fields)),
    )

    @api.get("/instances")
    async def instances() -> Listing[Instance]:
        """All instances and their load."""
        return Listing(data=[Instance.of(row, model) for row in rows()])

    @api.get("/requests")
    async def requests() -> Listing[Request]:
        """All live requests, in order of arrival."""
        return Listing(data=[Request.of(row) for row in await router.requests()])

    @api.post("/migrations", responses=errors)
    async def migrate(body: MigrationBody) -> Migration:
        """Move a request and wait for the end: 200 with the report, also when it was aborted.

        404 or 409 if it could not begin; the request's stream is untouched then.
        """
        return Migration.of(
            await router.migrate(body.request_id, body.destination, inexact=body.inexact)
        )

    @api.get("/migrations", responses={400: {"model": ErrorBody}})
    async def migrations(
        limit: Annotated[int, Query(ge=1, le=RECENT)] = 100,
    ) -> Listing[Migration]:
        """The last migrations, whoever asked for them, newest first."""
        newest_first = list(router.reports)[::-1]
        return Listing(data=[Migration.of(report) for report in newest_first[:limit]])

    return api
