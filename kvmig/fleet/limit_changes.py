"""Limits of keys and users, as orders change them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from sqlalchemy import select
from sqlalchemy.engine import Connection

from kvmig.accounts.keys import AccountLimits, ModelQuota, check_limits
from kvmig.core.errors import ConfigError
from kvmig.fleet.tables import models

SomeLimits = TypeVar("SomeLimits", bound=AccountLimits)


def changed(connection: Connection, old: SomeLimits, changes: Mapping[str, Any]) -> SomeLimits:
    """The limits after an order: of quotas, those of models that it names; None: no more.

    Raises ConfigError.
    """
    of_models = changes.get("quotas") or {}
    given = msgspec.convert(
        {name: quota for name, quota in of_models.items() if quota is not None},
        dict[str, ModelQuota],
    )
    check_models(connection, given)
    kept = {name: quota for name, quota in old.quotas.items() if name not in of_models}
    new = msgspec.structs.replace(old, **{**changes, "quotas": {**kept, **given}})
    check_limits(new)
    return new


def check_models(connection: Connection, named: Iterable[str]) -> None:
    """Check the models of quotas. Raises ConfigError for one that isn't in the catalogue."""
    for name in named:
        if connection.scalar(select(models.c.id).where(models.c.name == name)) is None:
            raise ConfigError(
                f"quotas: {name!r:.150} is no model, must be one of the catalogue; what its aliases"
                " and adapters use counts for it"
            )


def named_of(terms: AccountLimits, named: Iterable[str]) -> dict[str, Any]:
    """The named limits, as the database and the audit have them."""
    return {name: msgspec.to_builtins(getattr(terms, name)) for name in named}
