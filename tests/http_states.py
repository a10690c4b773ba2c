"""The middleware of a front end, around any application."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from kvmig.gateway.access import access
from kvmig.gateway.http import HttpMiddleware, HttpState
from kvmig.ground.config import HttpConfig
from kvmig.ground.priorities import NORMAL, PriorityClass


def behind_middleware(
    app: Starlette,
    http: HttpConfig | None = None,
    priorities: Sequence[PriorityClass] = (NORMAL,),
    *,
    closed: bool = False,
    vacant: Callable[[], bool] = lambda: False,
) -> HttpState:
    """Put `app` behind it, with a state of its own."""
    app.add_middleware(HttpMiddleware)
    return behind_state(app, http, priorities, closed=closed, vacant=vacant)


def behind_state(
    app: Starlette,
    http: HttpConfig | None = None,
    priorities: Sequence[PriorityClass] = (NORMAL,),
    *,
    closed: bool = False,
    vacant: Callable[[], bool] = lambda: False,
) -> HttpState:
    """Give an application that has the middleware a state of its own."""
    rules = access([], "", "127.0.0.1")
    state = HttpState(
        http or HttpConfig(), rules, priorities, CollectorRegistry(), closed=closed, vacant=vacant
    )
    app.state.kvmig = state
    return state
