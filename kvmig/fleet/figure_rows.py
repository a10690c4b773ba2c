"""What was measured of instances' memory, in the database: the next server begins with it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from sqlalchemy import delete, select

from kvmig.fleet.memory_figures import MeasuredRest, MemoryShape
from kvmig.fleet.tables import FleetDatabase, measured_rests, upsert

KEYS = [column.name for column in measured_rests.primary_key]


def store_figure(database: FleetDatabase, found: MeasuredRest) -> None:
    """Write a figure in place of the one of its shape. Raises StoreError."""
    fields = {"rest": found.rest, "model": found.model, "at": found.at}
    shape = {**msgspec.to_builtins(found.shape), "kinds": " ".join(found.shape.kinds)}
    row = {**shape, **fields}
    with database.transaction() as connection:
        upsert(connection, measured_rests, KEYS, [row])


def stored_figures(database: FleetDatabase) -> list[MeasuredRest]:
    """Read all figures. Raises StoreError."""
    with database.transaction(reading=True) as connection:
        rows = connection.execute(select(measured_rests)).mappings().all()
    return [
        MeasuredRest(
            shape=MemoryShape(
                **{name: row[name] for name in KEYS},
                kinds=tuple(row["kinds"].split()),
                vocabulary=row["vocabulary"],
            ),
            rest=row["rest"],
            model=row["model"],
            at=row["at"],
        )
        for row in rows
    ]


def forget_engines(database: FleetDatabase, engines: Iterable[str]) -> None:
    """Delete the figures of all other versions of engines. Raises StoreError."""
    with database.transaction() as connection:
        connection.execute(
            delete(measured_rests).where(measured_rests.c.engine.not_in(list(engines)))
        )
