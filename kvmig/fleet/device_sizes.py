"""What is known of how much models take of GPUs, in the database: the next server starts with it.

A row belongs to everything of a specification that decides it, not to a model's name: two models
alike have one, and a changed model begins again.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from sqlalchemy import delete, select

from kvmig.core.model_sizes import ModelSizes
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.tables import FleetDatabase, device_sizes, upsert
from kvmig.fleet.tensor_parallel import every_size


class RememberedSizes(NamedTuple):
    """What one row holds. Sizes are bytes."""

    started_as: str
    sizes: ModelSizes | None
    """What the engine says; None: it was not asked, or the row can't be read."""
    measured: int


def sizes_key(spec: ModelSpec) -> str:
    """Everything of a specification that decides what an instance takes, as a short key: two models
    with one key take the same."""
    words = spec.command or spec.flags
    parts = (spec.engine, spec.source, words, spec.workers, sorted(spec.adapters.items()))
    return blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def remember(database: FleetDatabase, known: RememberedSizes) -> None:
    """Write a row in place of the one with its key. Raises StoreError."""
    row = {
        "started_as": known.started_as,
        "sizes": None if known.sizes is None else msgspec.to_builtins(known.sizes),
        "measured": known.measured,
    }
    with database.transaction() as connection:
        upsert(connection, device_sizes, ["started_as"], [row])


def remembered(database: FleetDatabase) -> list[RememberedSizes]:
    """Read all rows. Raises StoreError."""
    with database.transaction(reading=True) as connection:
        rows = connection.execute(select(device_sizes)).mappings().all()
    return [
        RememberedSizes(row["started_as"], _sizes_of(row["sizes"]), row["measured"]) for row in rows
    ]


def forget_others(database: FleetDatabase, specs: Iterable[ModelSpec]) -> None:
    """Delete the rows that belong to none of these specifications. Raises StoreError."""
    kept = {sizes_key(one) for spec in specs for one in every_size(spec)}
    with database.transaction() as connection:
        connection.execute(delete(device_sizes).where(device_sizes.c.started_as.not_in(kept)))


def _sizes_of(found: object) -> ModelSizes | None:
    """A row that can't be read counts as none, and so does one of before padding counted: the
    engine is asked again, or has been measured."""
    try:
        sizes = None if found is None else msgspec.convert(found, ModelSizes)
    except msgspec.ValidationError:
        return None
    return None if sizes is None or (sizes.shortest and not sizes.reserved) else sizes
