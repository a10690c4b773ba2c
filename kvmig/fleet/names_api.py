"""Route of the names that a key may give requests, for people who are no admins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter

from kvmig.accounts.keys import KeyGrant
from kvmig.fleet.api_paths import routes_at
from kvmig.fleet.controller import ModelController
from kvmig.fleet.model_rows import ModelRow
from kvmig.fleet.store import FleetStore

Body = dict[str, Any]


def names_api(
    store: FleetStore,
    stored: Callable[..., Awaitable[Any]],
    models: ModelController,
    holder: Any,
) -> APIRouter:
    """stored: runs a method of the store. holder: the grant of the caller's key; None: of one that
    may use everything."""
    api = routes_at()

    @api.get("/names")
    async def list_names(grant: KeyGrant | None = holder) -> Body:
        """The models and aliases that a key may use, with their states; for keys of any scope."""
        rows = await stored(store.models)
        aliases = (await stored(store.fleet)).aliases
        only = None if grant is None else grant.models
        return {
            "data": [
                {"name": name, **state_of(models, targets)}
                for name, targets in sorted(usable_names(rows, aliases, only).items())
            ]
        }

    return api


def usable_names(
    rows: Sequence[ModelRow],
    aliases: Mapping[str, Mapping[str, int]],
    only: Sequence[str] | None,
) -> dict[str, list[str]]:
    """Models by the names that stand for them. only: names that a key may give; None: all."""
    every = {row.name: [row.name] for row in rows if row.on}
    every |= {name: [row.name] for row in rows if row.on for name in row.spec.aliases}
    every |= {name: list(targets) for name, targets in aliases.items()}
    return {name: found for name, found in every.items() if only is None or name in only}


def state_of(models: ModelController, targets: Sequence[str]) -> Body:
    """The state of the model that stands best of those that a name stands for."""
    fronts = [models.rollouts.front(one) or models.shown(one) for one in targets]
    known = sorted((one for one in fronts if one is not None), key=lambda one: not one.serves)
    if not known:
        return {"state": "zero", "start_s": None}
    return {"state": known[0].life.state, "start_s": known[0].start_s}
