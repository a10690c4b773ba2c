"""Rows of workers in the fleet's database: what is wanted of them, also while they are away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import RowMapping, delete, select

from kvmig.fleet.audit import AuditedOrder, add_to_audit
from kvmig.fleet.setaside import SetAside
from kvmig.fleet.store import OrderActor
from kvmig.fleet.tables import FleetDatabase, upsert, workers
from kvmig.fleet.workers import WorkerWish


def read_workers(database: FleetDatabase, set_aside: SetAside) -> list[WorkerWish]:
    """Read the rows; those that can't be read are set aside. Raises StoreError."""
    with database.transaction(reading=True) as connection:
        rows = connection.execute(select(workers).order_by(workers.c.name)).mappings()
        return set_aside.readable("worker", rows, _wish_of)


def _wish_of(row: RowMapping) -> WorkerWish:
    """Raises msgspec.MsgspecError."""
    return msgspec.convert({str(name): row[name] for name in row}, WorkerWish)  # plain strings


def order_worker(
    database: FleetDatabase,
    name: str,
    change: Callable[[WorkerWish], WorkerWish],
    action: str,
    actor: OrderActor,
    now: float,
) -> None:
    """Carry out an order about a worker together with its row of the audit. A row that wants
    nothing is deleted. action: label, cordon, drain or uncordon. Raises StoreError, and what
    `change` raises."""
    with database.transaction() as connection:
        found = connection.execute(select(workers).where(workers.c.name == name)).mappings()
        row = next((dict(one) for one in found), None)
        before = WorkerWish(name=name) if row is None else WorkerWish(**row)
        after = change(before)
        if after == before:
            return
        wanted: dict[str, Any] | None = msgspec.to_builtins(after)
        if replace(after, node="") == WorkerWish(name=name):
            wanted = None
            connection.execute(delete(workers).where(workers.c.name == name))
        else:
            upsert(connection, workers, ["name"], [msgspec.to_builtins(after)])
        order = AuditedOrder(f"worker.{action}", name, row, wanted)
        add_to_audit(connection, order, actor, now)
