"""Rows of models' files in the fleet's database: a row for each source that is wanted.

What a download does now is in no row: the next server begins with what is on the disk.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import delete, insert, select, update

from kvmig.fleet.audit import AuditedOrder, add_to_audit
from kvmig.fleet.store import OrderActor
from kvmig.fleet.tables import FleetDatabase, model_files, upsert


class FilesRow(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one source."""

    source: str
    folder: str = ""
    """The name of the whole folder; empty: there is none yet."""
    revision: str = ""
    size: int = 0
    digest: str = ""
    pulled: bool = False
    """Whether an order wants them, also without a model."""
    pinned: bool = False
    created: float
    last_used: float


def read_files(database: FleetDatabase) -> list[FilesRow]:
    """Read the rows. Raises StoreError."""
    with database.transaction(reading=True) as connection:
        rows = connection.execute(select(model_files).order_by(model_files.c.source)).mappings()
        return [FilesRow(**row) for row in rows]


def write_files(database: FleetDatabase, rows: list[FilesRow]) -> None:
    """Write rows in place of those of their sources. Raises StoreError."""
    if rows:
        with database.transaction() as connection:
            upsert(connection, model_files, ["source"], [msgspec.to_builtins(one) for one in rows])


def forget_files(database: FleetDatabase, source: str) -> None:
    """Delete a row. Raises StoreError."""
    with database.transaction() as connection:
        connection.execute(delete(model_files).where(model_files.c.source == source))


def order_files(
    database: FleetDatabase, row: FilesRow, action: str, actor: OrderActor, now: float
) -> None:
    """Carry out an order about files together with its row of the audit. action: pull, pin, unpin
    or remove. Raises StoreError."""
    with database.transaction() as connection:
        found = connection.execute(
            select(model_files).where(model_files.c.source == row.source)
        ).mappings()
        before = next((dict(one) for one in found), None)
        after: dict[str, Any] | None = None
        if action == "remove":
            connection.execute(delete(model_files).where(model_files.c.source == row.source))
        else:
            after = msgspec.to_builtins(row)
            if before is None:
                connection.execute(insert(model_files).values(**after))
            else:
                changed = update(model_files).where(model_files.c.source == row.source)
                connection.execute(changed.values(pulled=row.pulled, pinned=row.pinned))
        order = AuditedOrder(f"files.{action}", row.source, before, after)
        add_to_audit(connection, order, actor, now)
