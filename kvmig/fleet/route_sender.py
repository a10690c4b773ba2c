"""The routes of a fleet's models as proxies have them: what has changed is sent, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvmig.core.clock import TimeSource
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.model_routes import route_of, sockets_of
from kvmig.fleet.rollout_controller import ModelRollouts
from kvmig.fleet.round_faults import RoundFaults
from kvmig.proxy.messages import ModelRoute

SendRoutes = Callable[[Sequence[ModelRoute], Sequence[str]], int]
"""Sends proxies changed routes and names that are gone; the version."""


class RouteSender:
    """Knows which routes were sent last."""

    def __init__(
        self, send: SendRoutes, rollouts: ModelRollouts, faults: RoundFaults, clock: TimeSource
    ) -> None:
        self._send = send
        self._rollouts = rollouts
        self._faults = faults
        self._clock = clock
        self._routes: dict[str, ModelRoute] = {}

    def routes(self) -> list[ModelRoute]:
        """The routes, as proxies know them."""
        return list(self._routes.values())

    def send_changes(
        self, every: Iterable[ManagedModel], deployments: Iterable[ManagedModel]
    ) -> None:
        """Send what has changed. every: the models, one of each name. deployments: these, and
        those next to them; one that gets no new calls any more learns by which version."""
        there = {one.wanted.name: one for one in every if not one.removed}
        routes = {name: self._routes[name] for name in there if name in self._routes}
        for name, one in there.items():
            with self._faults.guard("routing", one):  # else its route stays as it was
                routes[name] = self._route(one)
        changed = [one for name, one in routes.items() if self._routes.get(name) != one]
        gone = [name for name in self._routes if name not in routes]
        if not changed and not gone:
            return
        version = self._send(changed, gone)
        before, self._routes = self._routes, routes
        unrouted = sockets_of(before.values()) - sockets_of(routes.values())
        for model in deployments:
            if model.socket in unrouted:
                model.unrouted_at = version

    def _route(self, own: ManagedModel) -> ModelRoute:
        name = own.wanted.name
        model = self._rollouts.front(name) or own
        if model.ready and model.watched is not None and model.watched.card is not None:
            model.card = model.watched.card
        return route_of(own, model, self._clock(), *self._rollouts.share(name))
