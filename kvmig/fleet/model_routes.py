"""The routes of models, as proxies get them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from kvmig.core.errors import ConfigError
from kvmig.core.priorities import NORMAL, PriorityClass
from kvmig.fleet.lifecycle import ModelStatus
from kvmig.fleet.managed_model import ManagedModel
from kvmig.launcher.flags import priority_classes
from kvmig.proxy.messages import ModelRoute, RouteState


@lru_cache(maxsize=1024)
def classes_of(flags: tuple[str, ...]) -> tuple[PriorityClass, ...]:
    """The priority classes that a deployment with these flags has."""
    flag, given = "--priority-class", []
    for at, one in enumerate(flags):
        name, equals, value = one.partition("=")
        if name.replace("_", "-") == flag:
            given.append(value if equals else "".join(flags[at + 1 : at + 2]))
    try:
        return priority_classes(given)
    except ConfigError:  # the deployment doesn't start, and says why
        return (NORMAL,)


def sockets_of(routes: Iterable[ModelRoute]) -> set[str]:
    """The deployments that new calls go to."""
    return {socket for one in routes for socket in (one.socket, one.next_socket) if socket}


def route_state(on: bool, life: ModelStatus, ready: bool, now: float) -> RouteState:
    """The state of a model as proxies get it. A retry that is due is like a cold start."""
    if not on:
        return "off"
    if life.state == "failed":
        return "failed" if now < life.retry_at else "cold"
    if life.state == "serving" and ready:
        return "ready"
    return "starting" if life.routed or life.state == "waking" else "cold"


def route_of(
    own: ManagedModel, model: ManagedModel, now: float, other: str, share: int
) -> ModelRoute:
    """The route under a model's name.

    model: the one that new calls go to, which a roll-out may have put in its place. other: the
    socket of a roll-out's second deployment, which gets `share` percent of new calls.
    """
    name, spec, life = own.wanted.name, model.wanted.spec, model.life
    state = route_state(own.wanted.on, life, model.ready > 0, now)
    return ModelRoute(
        name=name,
        state=state,
        socket=model.socket if state == "ready" else "",
        next_socket=other if state == "ready" else "",
        next_percent=share if state == "ready" else 0,
        served=spec.served or name,
        why=life.why,
        retry_s=life.retry_at - life.since if state == "failed" else None,
        start_s=model.start_s,
        start_timeout_s=spec.instances.start_timeout_s,
        heartbeat_after_s=spec.heartbeat_after_s,
        max_held=spec.max_held,
        priority=spec.priority,
        classes=classes_of(spec.flags),
        adapters=tuple(spec.adapters),
        card=model.card,
    )
