"""Orders that were made from what something was, and are refused once that has changed: a model, an
alias, a user, the limits of a key, a worker.

So that of two admins who change the same, the second learns of the first one's change before
undoing it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from kvmig.accounts.keys import AccountLimits
from kvmig.fleet.limit_changes import named_of
from kvmig.fleet.shown_specs import shown_spec
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.store import FleetStore, NameTaken, NotThere

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
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    return changed_values(old, new, shown=(shown_spec(old), shown_spec(new)))


def order_based_on_values(
    what: str,
    look: Callable[[], Mapping[str, Any] | None],
    based_on: Mapping[str, Any] | None,
    order: Callable[[], Result],
) -> Result:
    """The result of an order. look: what it changes, as it is now; None: it isn't there. based_on:
    what it was when the order was made; None: that is not compared.

    The store's thread runs it, where no other order comes between. Raises what the order raises;
    NameTaken with what has changed since.
    """
    if based_on is not None and (now := look()) is not None:
        check_values(what, based_on, now)
    return order()


def check_values(what: str, based_on: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises NameTaken with what has changed, unless it is now as it was when an order was made."""
    if now != based_on:
        raise NameTaken(
            f"{what}: {changed_values(based_on, now)} since this order was made; nothing was"
            " changed, look at what it is now and order again"
        )


def limits_of_key(store: FleetStore, prefix: str) -> dict[str, Any] | None:
    """The limits of a key; None: there is no such key."""
    try:
        return limits_in(store.key(prefix).terms)
    except NotThere:
        return None


def values_of_user(store: FleetStore, name: str, fields: Collection[str]) -> dict[str, Any] | None:
    """What these fields of a user are, of role, disabled and the limits of all keys; None: there is
    no such user."""
    try:
        found = store.user(name)
    except NotThere:
        return None
    every = {"role": found.role, "disabled": found.disabled, **limits_in(found.limits)}
    return {field: every[field] for field in fields}


def alias_of(store: FleetStore, name: str) -> Mapping[str, int]:
    """The weights of the models that a name stands for."""
    return store.fleet().aliases.get(name, {})


def alias_there(store: FleetStore, name: str) -> Mapping[str, int] | None:
    """The same; None: there is no such alias."""
    return store.fleet().aliases.get(name)


def limits_in(terms: AccountLimits) -> dict[str, Any]:
    """The limits among terms, as the API shows them."""
    return named_of(terms, AccountLimits.__struct_fields__)


def changed_values(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    shown: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
) -> str:
    """What two mappings have otherwise, in words. shown: both as they may be shown; None: as they
    are."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    then, now = shown or (old, new)
    values = ((one, shortened(then.get(one)), shortened(now.get(one))) for one in names)
    return ", ".join(f"{name} {before} became {after}" for name, before, after in values)


def shortened(value: object) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= MOST_VALUE else f"{text[: MOST_VALUE - 1]}…"
