"""Roll-outs in the fleet's database: a row for each model that is on its way to a new revision.

What deployments do is in no row: the next server sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from sqlalchemy import RowMapping, delete, select, update
from sqlalchemy.engine import Connection

from kvmig.core.errors import ConfigError
from kvmig.fleet.audit import AuditedOrder, add_to_audit
from kvmig.fleet.rollout import RolloutPlan, RolloutTerms, begun, need_of
from kvmig.fleet.setaside import SetAside
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.tables import FleetDatabase, models, revisions, rollouts, upsert
from kvmig.sources.source import parse_source


class StoredRollout(msgspec.Struct, frozen=True):
    """A roll-out, and what it began from."""

    plan: RolloutPlan
    base_spec: ModelSpec


def read_rollouts(connection: Connection, set_aside: SetAside) -> dict[str, StoredRollout]:
    """Read the rows, by models' ids. One that can't be read, or whose base can't, of another kvmig,
    is set aside: its model starts as the newest revision."""
    wanted = (
        select(rollouts, revisions.c.spec, models.c.name)
        .join(
            revisions,
            (revisions.c.model_id == rollouts.c.model_id) & (revisions.c.n == rollouts.c.base),
        )
        .join(models, models.c.id == rollouts.c.model_id)
    )
    rows = connection.execute(wanted).mappings()
    return dict(set_aside.readable("roll-out", rows, _stored_rollout))


def _stored_rollout(row: RowMapping) -> tuple[str, StoredRollout]:
    """The model's id with its roll-out. Raises msgspec.MsgspecError, ConfigError."""
    base = msgspec.convert(row["spec"], ModelSpec)
    parse_source(base.source)
    return row["model_id"], StoredRollout(_plan(row), base)


def begin_rollout(connection: Connection, name: str, terms: RolloutTerms, now: float) -> None:
    """Let the newest revision of a model, which was just made, roll out if it has to.

    One that only changes what takes effect at once changes no roll-out, and one that is as what the
    present roll-out began from ends that. One that is done counts no more.
    """
    model_id, number = connection.execute(
        select(models.c.id, models.c.revision).where(models.c.name == name)
    ).one()
    going = _row(connection, model_id)
    if going is not None and terms.over.get(model_id) == going.target:
        going = None
    base = number - 1 if going is None else going.base
    before, spec = _spec(connection, model_id, base), _spec(connection, model_id, number)
    if before is None or spec is None or need_of(before, spec) not in (
        "roll", "beside",
    ):  # fmt: skip
        connection.execute(delete(rollouts).where(rollouts.c.model_id == model_id))
        return
    aim = None if going is None else _spec(connection, model_id, going.target)
    if aim is not None and need_of(aim, spec) == "nothing":
        return
    plan = begun(terms, base, number, now)
    row = {"model_id": model_id, **msgspec.to_builtins(plan)}
    upsert(connection, rollouts, ["model_id"], [row])


def keep_step(database: FleetDatabase, model_id: str, plan: RolloutPlan) -> None:
    """Write how far a roll-out is, unless an order has put another one in its place.

    Raises StoreError.
    """
    with database.transaction() as connection:
        connection.execute(_of(update(rollouts), model_id, plan).values(**_columns(plan)))


def finish_rollout(database: FleetDatabase, model_id: str, plan: RolloutPlan) -> None:
    """Delete the row of a roll-out that is done. Raises StoreError."""
    with database.transaction() as connection:
        connection.execute(_of(delete(rollouts), model_id, plan))


def change_rollout(
    database: FleetDatabase,
    name: str,
    change: Callable[[RolloutPlan, float], RolloutPlan],
    actor: tuple[str, str],
    now: float,
) -> RolloutPlan:
    """Change a roll-out by an order, together with its row of the audit. actor: name and address.

    Raises ConfigError, also if the model has none; StoreError.
    """
    with database.transaction() as connection:
        model_id = connection.scalar(select(models.c.id).where(models.c.name == name))
        before = None if model_id is None else _row(connection, model_id)
        if model_id is None or before is None:
            raise ConfigError(f"model {name!r:.150} has no roll-out under way")
        after = change(before, now)
        connection.execute(_of(update(rollouts), model_id, before).values(**_columns(after)))
        shown = msgspec.to_builtins(before), msgspec.to_builtins(after)
        add_to_audit(connection, AuditedOrder("rollout.change", name, *shown), actor, now)
        return after


def earlier_spec(database: FleetDatabase, name: str, revision: int | None) -> ModelSpec:
    """The specification to go back to: of that revision; None: of what the present roll-out began
    from, or else the newest that is started otherwise. Raises ConfigError, StoreError.
    """
    with database.transaction(reading=True) as connection:
        row = connection.execute(
            select(models.c.id, models.c.revision).where(models.c.name == name)
        ).first()
        if row is None:
            raise ConfigError(f"no model {name!r:.150}")
        model_id, newest = row
        going = _row(connection, model_id)
        if revision is not None:
            found = _spec(connection, model_id, revision)
            if found is None:
                raise ConfigError(
                    f"revision is {revision}, must be one of model {name}'s, 1 to {newest}"
                )
            return found
        if going is not None and (base := _spec(connection, model_id, going.base)) is not None:
            return base
        spec = _spec(connection, model_id, newest)
        for number in range(newest - 1, 0, -1):
            earlier = _spec(connection, model_id, number)
            if earlier is not None and spec is not None and need_of(earlier, spec) != "nothing":
                return earlier
    raise ConfigError(f"model {name} has no earlier revision that is started otherwise")


def _of(statement: Any, model_id: str, plan: RolloutPlan) -> Any:
    return statement.where(rollouts.c.model_id == model_id, rollouts.c.target == plan.target)


def _columns(plan: RolloutPlan) -> dict[str, Any]:
    return {"step": plan.step, "since": plan.since, "state": plan.state, "why": plan.why}


def _row(connection: Connection, model_id: str) -> RolloutPlan | None:
    """A model's roll-out; None: there is none, or none that can be read."""
    wanted = select(rollouts).where(rollouts.c.model_id == model_id)
    row = connection.execute(wanted).mappings().first()
    try:
        return None if row is None else _plan(row)
    except msgspec.ValidationError:  # of another kvmig
        return None


def _plan(row: RowMapping) -> RolloutPlan:
    return msgspec.convert({name: row[name] for name in RolloutPlan.__struct_fields__}, RolloutPlan)


def _spec(connection: Connection, model_id: str, number: int) -> ModelSpec | None:
    """The revision's specification; None: there is no such one, or it is of another kvmig."""
    found = connection.scalar(
        select(revisions.c.spec).where(revisions.c.model_id == model_id, revisions.c.n == number)
    )
    return None if found is None else _readable(found)


def _readable(spec: Any) -> ModelSpec | None:
    try:
        return msgspec.convert(spec, ModelSpec)
    except msgspec.ValidationError:
        return None
