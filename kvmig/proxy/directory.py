"""What a proxy knows of keys, routes and aliases, from the server or from its own file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import NamedTuple

from kvmig.accounts.keys import KeyGrant
from kvmig.accounts.keys import KeyIndex as KnownKeys
from kvmig.accounts.page_sessions import SessionCookies
from kvmig.asgi.body_bounds import ModelReach, widest
from kvmig.proxy.answer_ids import model_of_answer, new_answer_id
from kvmig.proxy.messages import (
    AliasTable,
    FleetSnapshot,
    KeyUpdates,
    Known,
    ModelRoute,
    RouteChanges,
)

NOTHING = -1
"""The version before any snapshot."""


class FoundModel(NamedTuple):
    """The target of a model's name. served: the name by which the deployment knows it."""

    model: str
    served: str


class ModelDirectory:
    """The models as a proxy knows them; `apply` changes it."""

    def __init__(self) -> None:
        self.version = NOTHING
        self.routes: dict[str, ModelRoute] = {}
        self._pepper = b""
        self._grants: dict[str, KeyGrant] = {}
        self._keys = KnownKeys(b"")
        self.cookies = SessionCookies(b"")
        """The rules of the page's sessions; without keys they find none."""
        self._aliases: Mapping[str, Mapping[str, int]] = {}
        self._adapters: dict[str, str] = {}
        self._reaches: dict[tuple[str, ...] | None, ModelReach | None] = {}
        """Reaches by the models that keys may use; forgotten when models change."""

    def apply(self, message: Known) -> set[str]:
        """Take a message of the server; returns the models whose routes have changed."""
        changed: set[str] = set()
        self._reaches.clear()
        match message:
            case FleetSnapshot():
                changed = set(self.routes) | {route.name for route in message.routes}
                if message.pepper != self._pepper:
                    self.cookies = SessionCookies(message.pepper)
                self._pepper = message.pepper
                self._grants = {grant.prefix: grant for grant in message.keys}
                self._keys = KnownKeys(message.pepper, message.keys)
                self._aliases = message.aliases
                self.routes = {route.name: route for route in message.routes}
            case KeyUpdates():
                self._keys.update(message.changed, message.removed)
                self._grants.update((grant.prefix, grant) for grant in message.changed)
                for prefix in message.removed:
                    self._grants.pop(prefix, None)
            case RouteChanges():
                changed = {route.name for route in message.changed} | set(message.removed)
                for name in message.removed:
                    self.routes.pop(name, None)
                self.routes.update((route.name, route) for route in message.changed)
            case AliasTable():
                self._aliases = message.aliases
        if changed:
            self._adapters = {
                adapter: route.name for route in self.routes.values() for adapter in route.adapters
            }
        self.version = message.version
        return changed

    def snapshot(self) -> FleetSnapshot:
        """The directory as a message."""
        return FleetSnapshot(
            version=self.version,
            pepper=self._pepper,
            keys=tuple(self._grants.values()),
            routes=tuple(self.routes.values()),
            aliases=self._aliases,
        )

    def grant(self, presented: str) -> KeyGrant | None:
        """The grant of a key; None if there is no such key."""
        return self._keys.find(presented)

    def current(self, prefix: str) -> KeyGrant | None:
        """The present grant of a key presented before; None if the key is no longer valid."""
        return self._grants.get(prefix)

    def find(self, name: str, call_id: str) -> FoundModel | None:
        """A model by its name, an alias, `model:adapter` or an adapter's name, in this order.

        call_id: chooses among an alias's models by their weights, so that the same call goes to
        the same one.
        """
        model = name if name in self.routes else self._behind(name, call_id)
        if model is not None:
            route = self.routes.get(model)
            return None if route is None else FoundModel(model, route.served or model)
        base, _, adapter = name.rpartition(":")
        if base in self.routes and adapter in self.routes[base].adapters:
            return FoundModel(base, adapter)
        owner = self._adapters.get(name)
        return None if owner is None else FoundModel(owner, name)

    def may_reach(self, grant: KeyGrant, model: str) -> bool:
        """Whether a name that a key may use leads to the model."""
        return grant.models is None or any(model in self.models_of(one) for one in grant.models)

    def model_of_answer(self, answer_id: str, grant: KeyGrant) -> str | None:
        """Which model has an earlier answer; None: there is none of the key's user's."""
        model = model_of_answer(self._pepper, answer_id, grant.user_id, self.routes)
        return model if model is not None and self.may_reach(grant, model) else None

    def new_answer_id(self, grant: KeyGrant, model: str) -> str:
        """A new id for an answer that the key's user may ask for again."""
        return new_answer_id(self._pepper, grant.user_id, model)

    def names(self, grant: KeyGrant) -> Iterator[tuple[str, ModelRoute]]:
        """What a key may use: models that aren't off, their adapters, aliases."""
        every = [
            (name, route)
            for route in self.routes.values()
            for name in (route.name, *route.adapters)
        ]
        for alias, weights in self._aliases.items():
            behind = next((self.routes[one] for one in weights if one in self.routes), None)
            if alias not in self.routes and behind is not None:
                every.append((alias, behind))
        for name, route in every:
            if route.state != "off" and (grant.models is None or name in grant.models):
                yield name, route

    def reach(self, grant: KeyGrant, name: str | None) -> ModelReach | None:
        """What is of use to the models that a call may be for; None: it isn't known of all.

        name: of the model, that its path has; None: the body has it.
        """
        if name is not None:
            return self._widest((name,))
        if grant.models not in self._reaches:
            self._reaches[grant.models] = self._widest(grant.models)
        return self._reaches[grant.models]

    def routes_of(self, grant: KeyGrant, name: str | None) -> list[ModelRoute]:
        """Routes of the models that a call may be for. name: as for `reach`."""
        names = grant.models if name is None else (name,)
        if names is None:
            return list(self.routes.values())
        models = {model for one in names for model in self.models_of(one)}
        return [self.routes[one] for one in models if one in self.routes]

    def _widest(self, names: Iterable[str] | None) -> ModelReach | None:
        """The widest reach of these names; None: all names."""
        if names is None:
            return widest(one.card.reach for one in self.routes.values())
        models = {model for name in names for model in self.models_of(name)}
        return widest(self.routes[one].card.reach for one in models if one in self.routes)

    def models_of(self, name: str) -> Iterable[str]:
        """Models that a name may mean."""
        if name in self.routes:
            return (name,)
        if name in self._aliases:
            return self._aliases[name]
        found = self.find(name, "")
        return () if found is None else (found.model,)

    def _behind(self, alias: str, call_id: str) -> str | None:
        weights = self._aliases.get(alias)
        total = sum(weights.values()) if weights else 0
        if not weights or total <= 0:
            return None
        drawn = int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest(), "big") % total
        for model, weight in weights.items():
            drawn -= weight
            if drawn < 0:
                return model
        return None
