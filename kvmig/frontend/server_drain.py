"""Routes that drain this whole server, and show what drains at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvmig.asgi.access import Rule
from kvmig.asgi.problems import PROBLEMS, ErrorBody, Responses, guarded
from kvmig.asgi.strict_body import StrictBody
from kvmig.controlplane.messages import DrainInstance, StopDrain
from kvmig.core.api_records import InstanceRow
from kvmig.frontend.admin import PREFIX
from kvmig.frontend.drain_report import drain_report
from kvmig.frontend.launcher_link import LauncherLink
from kvmig.frontend.order_tokens import GivenToken
from kvmig.frontend.router import FrontendRouter
from kvmig.frontend.struct_answers import DRAIN, answer, shows


def server_drain_api(
    router: FrontendRouter,
    launcher: LauncherLink,
    rows: Callable[[], list[InstanceRow]],
    unlike: Callable[[], Mapping[str, str]],
    rule: Rule,
) -> APIRouter:
    """Routes about all instances of this server at once.

    rows: of all instances. unlike: servers that can't take its requests, and why. rule: who may
    call the routes.
    """
    errors: Responses = {status: {"model": ErrorBody} for status in (400, 404, 409, 503)}
    api = APIRouter(
        prefix=PREFIX,
        tags=["kvmig"],
        responses=PROBLEMS,
        route_class=guarded(rule, tuple(ServerDrainBody.model_fields)),
    )

    async def report(status: HTTPStatus = HTTPStatus.OK) -> Response:
        requests = await router.requests()
        return answer(drain_report(rows(), requests, list(router.reports), unlike()), status)

    @api.get("/drain", responses=shows(DRAIN))
    async def show() -> Response:
        """Show what drains at this server, and what keeps requests that are left where they are."""
        return await report()

    @api.post(
        "/drain",
        status_code=HTTPStatus.ACCEPTED,
        responses=errors | shows(DRAIN, HTTPStatus.ACCEPTED),
    )
    async def drain(token: GivenToken, body: ServerDrainBody | None = None) -> Response:
        """Let the requests of all instances of this server go to other servers.

        The server goes on to take calls, which run elsewhere, and relays its clients' streams. 409
        if no other server could take its requests; nothing is changed then.
        """
        wanted = body or ServerDrainBody()
        await launcher.order(
            lambda call_id: DrainInstance(
                call_id, "", wanted.deadline_s, leave=wanted.leave, token=token
            )
        )
        return await report(HTTPStatus.ACCEPTED)

    @api.delete("/drain", responses=errors | shows(DRAIN))
    async def stop_drain(token: GivenToken) -> Response:
        """Let all instances of this server that drain serve again."""
        await launcher.order(lambda call_id: StopDrain(call_id, "", token))
        return await report()

    return api


class ServerDrainBody(StrictBody):
    """Let the requests of all instances of this server go to other servers."""

    deadline_s: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="A request that is still there then goes on elsewhere by recompute, or ends"
        " with an error where no other instance has its weights; null: --drain-deadline, and such"
        " requests stay until they end.",
    )
    leave: bool = Field(
        default=False,
        description="End each instance once it is empty, which frees its device; the server stays.",
    )
