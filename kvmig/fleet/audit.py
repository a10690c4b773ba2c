"""The audit: every order adds a row, in the transaction that carries it out."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import insert
from sqlalchemy.engine import Connection

from kvmig.fleet.tables import audit


class AuditedOrder(NamedTuple):
    """What the audit keeps of an order, besides who gave it and when."""

    action: str
    """What was done with which kind of thing, such as model.change."""
    about: str
    """The name of that thing."""
    before: Any = None
    after: Any = None


def add_to_audit(
    connection: Connection, order: AuditedOrder, actor: tuple[str, str], now: float
) -> int:
    """Add the row; its id, which is the version that the order makes. actor: name and address."""
    name, address = actor
    found = connection.execute(
        insert(audit).values(
            at=now,
            actor=name,
            address=address,
            action=order.action,
            object=order.about,
            before=order.before,
            after=order.after,
        )
    )
    assert found.inserted_primary_key is not None
    return int(found.inserted_primary_key[0])
