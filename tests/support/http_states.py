"""The middleware of a front end, around any application."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from kvmig.asgi.access import access
from kvmig.core.config import HttpConfig
from kvmig.core.priorities import NORMAL, PriorityClass
from kvmig.frontend.middleware import HttpMiddleware, HttpState


def behind_middleware(
    app: Starlette,
    http: HttpConfig | None = None,
    priorities: Sequence[PriorityClass] = (NORMAL,),
    *,
    closed: bool = False,
    vacant: Callable[[], bool] = lambda: False,
    without_engine: Callable[[], bool] = lambda: False,
    added: bool = False,
) -> HttpState:
    """Give `app` the middleware, unless it was added before, with a state of its own."""
    if not added:
        app.add_middleware(HttpMiddleware)
    rules = access([], "", "127.0.0.1")
    state = HttpState(
        http or HttpConfig(),
        rules,
        priorities,
        CollectorRegistry(),
        closed=closed,
        vacant=vacant,
        without_engine=without_engine,
    )
    app.state.kvmig = state
    return state
