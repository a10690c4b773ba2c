"""What load balancers and supervisors ask: whether calls are taken, whether the process lives."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmig.asgi.problems import problem
from kvmig.asgi.request_body import RETRY_AFTER
from kvmig.asgi.route_table import LIVE_PATH
from kvmig.frontend.middleware import HttpState, why_closed

READY_PATHS = ("/health", "/ping")
"""200 where a call would be taken, else 503 with the reason. The second is SageMaker's."""


def probe_routes(http: HttpState, broken: Callable[[], bool]) -> list[Route]:
    """The probes of a front end. broken: whether its engine's client can go on no more."""

    async def ready(_: Request) -> Response:
        sentence = why_closed(http) or http.uncounted()
        if not sentence and broken():
            sentence = "the engine's client has failed"
        if not sentence:
            return Response()
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, sentence, headers=RETRY_AFTER)

    async def live(_: Request) -> Response:
        return Response()

    return [*(Route(path, ready) for path in READY_PATHS), Route(LIVE_PATH, live)]
