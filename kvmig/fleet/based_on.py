"""Orders that were made from a revision of a model, and are refused once there is a newer one.

So that of two admins who change the same model, the second learns of the first one's change before
undoing it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.store import FleetStore, NameTaken

MOST_VALUE = 100
"""Characters of a changed value that are shown."""

Result = TypeVar("Result")


def order_based_on(
    store: FleetStore, based_on: Mapping[str, int], order: Callable[[], Result]
) -> Result:
    """The result of an order. based_on: the revisions that it was made from, by models.

    The store's thread runs it, where no other order comes between. Raises what the order raises;
    NotThere; NameTaken with what has changed since.
    """
    for name, revision in based_on.items():
        check_revision(store, name, revision)
    return order()


def check_revision(store: FleetStore, name: str, revision: int) -> None:
    """Raises NameTaken unless the revision is the model's newest one."""
    newest, *older = store.revisions(name)
    if newest.revision == revision:
        return
    before = next((one for one in older if one.revision == revision), None)
    what = "" if before is None else f": {changed_fields(before.spec, newest.spec)}"
    raise NameTaken(
        f"model {name} has revision {newest.revision} by {newest.author} now, and this order was"
        f" made from revision {revision}{what}; nothing was changed, look at the newest one and"
        " order again"
    )


def changed_fields(before: ModelSpec, after: ModelSpec) -> str:
    """What two specifications have otherwise, in words."""
    old: dict[str, Any] = msgspec.to_builtins(before)
    new: dict[str, Any] = msgspec.to_builtins(after)
    names = [name for name in new if old[name] != new[name]]
    return ", ".join(f"{one} {shortened(old[one])} became {shortened(new[one])}" for one in names)


def shortened(value: object) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= MOST_VALUE else f"{text[: MOST_VALUE - 1]}…"
