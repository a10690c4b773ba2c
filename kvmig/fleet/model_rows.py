"""Rows of models in the fleet's database, and what aliases stand for.

A row that another kvmig wrote may be unreadable here: it stays as it is, is named in the log, and
keeps no other one back.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import RowMapping, Select, select
from sqlalchemy.engine import Connection

from kvmig.core.errors import ConfigError
from kvmig.fleet.setaside import SetAside
from kvmig.fleet.spec import FleetFile, ModelSpec
from kvmig.fleet.tables import StoreError, aliases, models, revisions
from kvmig.sources.source import parse_source


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the catalogue, at its newest revision."""

    model_id: str
    name: str
    revision: int
    on: bool
    """Whether it may run."""
    spec: ModelSpec
    created: float
    changed: float
    author: str
    """Author of the revision."""


def models_with_specs() -> Select[Any]:
    """The revisions of all models."""
    return select(
        models.c.id,
        models.c.name,
        models.c.enabled,
        models.c.created,
        revisions.c.n,
        revisions.c.spec,
        revisions.c.author,
        revisions.c.created.label("changed"),
    ).join(revisions, revisions.c.model_id == models.c.id)


def newest_models() -> Select[Any]:
    """The newest revision of each model, by name."""
    return models_with_specs().where(revisions.c.n == models.c.revision).order_by(models.c.name)


def model_row(row: RowMapping) -> ModelRow:
    """Raises StoreError for what another kvmig wrote, which had other fields or sources."""
    try:
        spec = msgspec.convert(row["spec"], ModelSpec)
        parse_source(spec.source)
    except (msgspec.ValidationError, ConfigError) as error:
        raise StoreError(f"the fleet's database has a model {row['name']} with {error}") from error
    return ModelRow(
        model_id=row["id"],
        name=row["name"],
        revision=row["n"],
        on=row["enabled"],
        spec=spec,
        created=row["created"],
        changed=row["changed"],
        author=row["author"],
    )


def aliases_in(connection: Connection) -> dict[str, dict[str, int]]:
    """The aliases, with the weights of their models."""
    named: dict[str, dict[str, int]] = {}
    wanted = (
        select(aliases.c.name, models.c.name, aliases.c.weight)
        .join(models, models.c.id == aliases.c.model_id)
        .order_by(aliases.c.name, models.c.name)
    )
    for alias, model, weight in connection.execute(wanted):
        named.setdefault(alias, {})[model] = weight
    return named


def fleet_in(connection: Connection, set_aside: SetAside) -> FleetFile:
    """The catalogue, as a file would have it. Rows that can't be read are left out, and aliases
    stand for the rest."""
    rows = connection.execute(newest_models()).mappings()
    specs = [one.spec for one in set_aside.readable("model", rows, model_row)]
    known = {one.name for one in specs}
    named = {
        alias: {model: weight for model, weight in targets.items() if model in known}
        for alias, targets in aliases_in(connection).items()
    }
    return FleetFile(tuple(specs), {alias: to for alias, to in named.items() if to})
