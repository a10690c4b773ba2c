"""The fleet's memory: models with their revisions, aliases, users, keys, and who changed what.

Every order is one transaction, together with its row of the audit. A `FleetStore` is for one
thread. Where the database can't be used now, an order raises StoreError and has changed nothing;
the next one tries again.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import mkstemp
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec
from sqlalchemy import RowMapping, Select, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from kvmig.accounts.keys import (
    AccountLimits,
    KeyGrant,
    KeyTerms,
    NewKey,
    check_terms,
    new_key,
    remembered,
)
from kvmig.core.errors import ConfigError, KvmigError
from kvmig.fleet.account_lists import FoundRows, ListWindow, in_window, with_words
from kvmig.fleet.audit import AuditedOrder, add_to_audit
from kvmig.fleet.copies import copy_sqlite
from kvmig.fleet.limit_changes import changed, check_models, named_of
from kvmig.fleet.model_rows import (
    ModelRow,
    aliases_in,
    fleet_in,
    model_row,
    models_with_specs,
    newest_models,
)
from kvmig.fleet.pepper import check_pepper, kept_pepper, read_pepper, shown_pepper
from kvmig.fleet.rollout import AT_ONCE, RolloutTerms
from kvmig.fleet.rollout_table import StoredRollout, begin_rollout, read_rollouts
from kvmig.fleet.setaside import SetAside, converted
from kvmig.fleet.spec import (
    NAME,
    NAMES,
    FleetFile,
    ModelSpec,
    SpecChange,
    changes,
    check_callable,
    check_names,
    merged,
    scaled,
    standing_for,
)
from kvmig.fleet.tables import (
    FleetDatabase,
    StoreError,
    aliases,
    api_keys,
    audit,
    meta,
    models,
    placement,
    revisions,
    users,
)

Listed = TypeVar("Listed")
Role = Literal["admin", "user"]
ROLES: tuple[str, ...] = get_args(Role)
MOST_KEEP_S = 365 * 86400.0
ADMIN_TERMS = KeyTerms(scopes=("infer", "read", "admin"))


class NotThere(KvmigError):
    """An order names something that isn't there."""


class NameTaken(KvmigError):
    """An order makes something that is there already."""


class OrderActor(NamedTuple):
    """The person or program that gives an order, with its address."""

    name: str
    address: str = ""


class UserRow(msgspec.Struct, frozen=True, kw_only=True):
    """A user."""

    user_id: str
    name: str
    role: Role
    disabled: bool
    created: float
    limits: AccountLimits = AccountLimits()
    """Limits of all keys together."""
    subject: str = ""
    """The person of an identity provider; empty: of none."""


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key, as lists show it."""

    key_id: str
    prefix: str
    name: str
    user: str
    terms: KeyTerms
    created: float
    revoked_at: float | None
    origin: str
    """Id of the first of the keys that were rotated into this one."""


class KeyChanges(NamedTuple):
    """What has happened to keys since an older version."""

    version: int
    granted: tuple[KeyGrant, ...]
    revoked: tuple[str, ...]
    """Prefixes."""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One change: who made it, from where, and what was there before and after."""

    id: int
    at: float
    actor: str
    address: str
    action: str
    object: str
    before: Any
    after: Any


class FleetStore:
    """The catalogue and the accounts. `open` it, then `close` it."""

    def __init__(
        self,
        url: str,
        pepper: Path,
        *,
        wait_s: float = 5.0,
        clock: Callable[[], float] = time.time,
        host: str = "",
    ) -> None:
        """pepper: file of the secret under which keys are hashed; made if there are no keys yet.

        wait_s: for a lock that another program has. host: name of the server's host, for other
        servers. Raises ConfigError.
        """
        self.database = FleetDatabase(url, wait_s, host=host)
        self._pepper_file = pepper
        self._pepper = b""
        self._clock = clock
        self.set_aside = SetAside()
        """Rows that can't be read."""

    @property
    def pepper(self) -> bytes:
        """The secret under which keys are hashed; for `kvmig.accounts.keys.KeyIndex`."""
        return self._pepper

    def open(self) -> None:
        """Open the database. Raises StoreError if it can't be used."""
        self.database.open()
        try:
            self._pepper = self._checked_pepper()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the database to the next server."""
        self.database.close()

    def backup(self, path: Path) -> None:
        """Copy the database into a new file while it is in use; on any thread, for it has a
        connection of its own. The pepper's file isn't in it."""
        if self.database.path is None:
            raise ConfigError("a backup of PostgreSQL is its own tools' work: run pg_dump")
        if not path.is_absolute() or not str(path).isprintable():
            raise ConfigError(f"{str(path)!r:.150} must be a new file's whole path")
        try:
            if path.exists():
                raise ConfigError(f"{path} is there already, must be a new file")
            # In a folder of several users a name that others know could be a link of theirs.
            descriptor, name = mkstemp(".part", f"{path.name}.", path.parent)
            os.close(descriptor)
            try:
                copy_sqlite(self.database.path, Path(name))
                Path(name).replace(path)
            finally:
                Path(name).unlink(missing_ok=True)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{path} can't be written: {error}") from error

    def version(self) -> int:
        """The version of the whole store; every order increases it."""
        with self.database.transaction(reading=True) as connection:
            return _version(connection)

    def audit(self, before: int | None = None, limit: int = 100) -> list[AuditRow]:
        """The newest rows with a smaller id than `before`, the newest first."""
        wanted = select(audit).order_by(audit.c.id.desc()).limit(limit)
        if before is not None:
            wanted = wanted.where(audit.c.id < before)
        with self.database.transaction(reading=True) as connection:
            return [AuditRow(**row) for row in connection.execute(wanted).mappings()]

    # -- models

    def models(self) -> list[ModelRow]:
        """The rows, by name."""
        with self.database.transaction(reading=True) as connection:
            return self._models(connection)

    def _models(self, connection: Connection) -> list[ModelRow]:
        rows = connection.execute(newest_models()).mappings()
        return self.set_aside.readable("model", rows, model_row)

    def model(self, name: str) -> ModelRow:
        """Raises NotThere."""
        with self.database.transaction(reading=True) as connection:
            return _model(connection, name)

    def revisions(self, name: str) -> list[ModelRow]:
        """The revisions of a model, the newest first. Raises NotThere."""
        with self.database.transaction(reading=True) as connection:
            _model(connection, name)
            wanted = models_with_specs().where(models.c.name == name).order_by(revisions.c.n.desc())
            return [model_row(row) for row in connection.execute(wanted).mappings()]

    def catalogue(
        self,
    ) -> tuple[list[ModelRow], Mapping[str, Mapping[str, int]], Mapping[str, StoredRollout]]:
        """The models, by name, the aliases with weights, and the roll-outs, by models' ids."""
        with self.database.transaction(reading=True) as connection:
            return (
                self._models(connection),
                aliases_in(connection),
                read_rollouts(connection, self.set_aside),
            )

    def fleet(self) -> FleetFile:
        """The whole catalogue, as a fleet's file has it."""
        with self.database.transaction(reading=True) as connection:
            return fleet_in(connection, self.set_aside)

    def apply(
        self,
        fleet: FleetFile,
        actor: OrderActor,
        *,
        prune: bool = False,
        dry_run: bool = False,
        terms: RolloutTerms = AT_ONCE,
    ) -> list[SpecChange]:
        """Make the catalogue as the file says; return what that changes (or would: dry_run).

        prune: remove what the file doesn't name. terms: how changed models roll out. Raises
        ConfigError.
        """
        with self.database.transaction(reading=dry_run) as connection:
            old = fleet_in(connection, self.set_aside)
            found = changes(old, merged(old, fleet, prune=prune))
            if not dry_run:
                self._change(connection, found, actor, terms)
            return found

    def add_model(self, spec: ModelSpec, actor: OrderActor) -> ModelRow:
        """Raises NameTaken, ConfigError."""
        with self.database.transaction() as connection:
            old = fleet_in(connection, self.set_aside)
            if any(one.name == spec.name for one in old.models):
                raise NameTaken(f"a model {spec.name!r} is there already")
            return self._renew(connection, old, spec, actor)

    def scale(
        self, name: str, actor: OrderActor, *, least: int | None = None, most: int | None = None
    ) -> ModelRow:
        """Set other bounds of its instances, in a new revision. Raises NotThere, ConfigError."""
        with self.database.transaction() as connection:
            spec = scaled(_model(connection, name).spec, least, most)
            return self._renew(connection, fleet_in(connection, self.set_aside), spec, actor)

    def switch(self, name: str, actor: OrderActor, *, on: bool) -> ModelRow:
        """Switch a model on or off. Raises NotThere."""
        with self.database.transaction() as connection:
            found = _model(connection, name)
            if found.on != on:
                what = SpecChange("switch", "model", name, {"on": found.on}, {"on": on})
                self._note(connection, actor, what)
                connection.execute(update(models).where(models.c.name == name).values(enabled=on))
            return msgspec.structs.replace(found, on=on)

    def remove_model(self, name: str, actor: OrderActor) -> None:
        """Remove a model and its revisions. Raises NotThere, NameTaken if an alias is for it."""
        with self.database.transaction() as connection:
            row = _named_row(
                connection, newest_models().where(models.c.name == name), name, "model"
            )
            old = fleet_in(connection, self.set_aside)
            if alias := standing_for(FleetFile((), aliases_in(connection)), name):
                raise NameTaken(
                    f"alias {alias} stands for model {name}: `kvmig alias rm {alias}` first, or"
                    f" `kvmig alias set {alias}` without it"
                )
            rest = tuple(spec for spec in old.models if spec.name != name)
            new = check_names(msgspec.structs.replace(old, models=rest))
            found = changes(old, new) or [SpecChange("remove", "model", name, row["spec"], None)]
            self._change(connection, found, actor)

    def set_alias(self, name: str, targets: Mapping[str, int], actor: OrderActor) -> None:
        """A name that stands for models by weights; with no targets: for none any more.

        Raises NotThere, ConfigError.
        """
        with self.database.transaction() as connection:
            old = fleet_in(connection, self.set_aside)
            if not targets and name not in old.aliases:
                raise NotThere(f"no alias {name[:150]!r}")
            rest = {other: to for other, to in old.aliases.items() if other != name}
            wanted = {**rest, name: dict(targets)} if targets else rest
            new = check_names(FleetFile(old.models, wanted))
            self._change(connection, changes(old, new), actor)

    def placement(self) -> Any:
        """The desired placement, as JSON; None: there is none."""
        with self.database.transaction(reading=True) as connection:
            return connection.scalar(select(placement.c.wanted))

    def set_placement(self, wanted: Any, actor: OrderActor) -> None:
        """Want another one, as JSON has it; None: none any more."""
        with self.database.transaction() as connection:
            before = connection.scalar(select(placement.c.wanted))
            if wanted == before:
                return
            action: Literal["add", "change", "remove"] = (
                "add" if before is None else "remove" if wanted is None else "change"
            )
            self._note(connection, actor, SpecChange(action, "placement", "", before, wanted))
            connection.execute(delete(placement))
            if wanted is not None:
                connection.execute(insert(placement).values(id=1, wanted=wanted))

    def _renew(
        self, connection: Connection, old: FleetFile, spec: ModelSpec, actor: OrderActor
    ) -> ModelRow:
        new = merged(old, FleetFile((spec,)), prune=False)
        self._change(connection, changes(old, new), actor)
        return _model(connection, spec.name)

    def _change(
        self,
        connection: Connection,
        found: Iterable[SpecChange],
        actor: OrderActor,
        terms: RolloutTerms = AT_ONCE,
    ) -> None:
        """Aliases are taken away before models, and made after them."""
        now, notes = self._clock(), list(found)
        for change in notes:
            self._note(connection, actor, change)
            if change.kind == "alias" and change.before is not None:
                connection.execute(delete(aliases).where(aliases.c.name == change.name))
        for change in notes:
            if change.kind == "model" and change.after is None:
                connection.execute(delete(models).where(models.c.name == change.name))
            elif change.kind == "model":
                _revise(connection, change.name, change.after, actor.name, now)
                if change.before is not None:
                    begin_rollout(connection, change.name, terms, now)
        ids: dict[str, str] = {
            name: key for key, name in connection.execute(select(models.c.id, models.c.name))
        }
        for change in notes:
            if change.kind == "alias" and change.after is not None:
                rows = [
                    {"name": change.name, "model_id": ids[model], "weight": weight}
                    for model, weight in change.after.items()
                ]
                connection.execute(insert(aliases), rows)

    # -- users and keys

    def user_of(self, subject: str) -> UserRow | None:
        """The user that a person of an identity provider has here, if there is one."""
        wanted = select(users).where(users.c.subject == subject)
        with self.database.transaction(reading=True) as connection:
            found = connection.execute(wanted).mappings()
            return next(iter(self.set_aside.readable("user", found, _user_row)), None)

    def user(self, name: str) -> UserRow:
        """Raises NotThere."""
        with self.database.transaction(reading=True) as connection:
            return _user(connection, name)

    def find_users(self, window: ListWindow) -> FoundRows[UserRow]:
        """Users by name."""
        wanted = select(users).where(with_words(window.find, [users.c.name])).order_by(users.c.name)
        return self._found("user", wanted, window, _user_row)

    def add_user(self, name: str, role: str, actor: OrderActor, *, subject: str = "") -> UserRow:
        """subject: see `UserRow`. Raises NameTaken, ConfigError."""
        if not NAME.fullmatch(name):
            raise ConfigError(f"name is {name!r:.150}, must be {NAMES}")
        with self.database.transaction() as connection:
            return self._add_user(connection, name, _checked_role(role), actor, subject)

    def set_user(
        self,
        name: str,
        actor: OrderActor,
        *,
        role: str | None = None,
        disabled: bool | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> UserRow:
        """Change a role, whether the user's keys let requests in, or some of the user's limits.

        One admin remains, who could undo it. Raises NotThere, ConfigError.
        """
        with self.database.transaction() as connection:
            old = _user(connection, name)
            new = msgspec.structs.replace(
                old,
                role=old.role if role is None else _checked_role(role),
                disabled=old.disabled if disabled is None else disabled,
                limits=changed(connection, old.limits, limits or {}),
            )
            if new == old:
                return old
            before, named = _changeable(old), _changeable(new)
            connection.execute(update(users).where(users.c.id == old.user_id).values(**named))
            admins = select(users.c.id).where(users.c.role == "admin", ~users.c.disabled)
            if old.role == "admin" and connection.execute(admins).first() is None:
                raise ConfigError(f"{name} is the only admin, must be one and not disabled")
            version = self._note(
                connection, actor, SpecChange("change", "user", name, before, named)
            )
            connection.execute(
                update(api_keys).where(api_keys.c.user_id == old.user_id).values(version=version)
            )
            return new

    def keys(self, user: str | None = None) -> list[KeyRow]:
        """The keys of all users, or of one, revoked ones too; the oldest first."""
        wanted = _keys_of_users().order_by(api_keys.c.created, api_keys.c.id)
        if user is not None:
            wanted = wanted.where(users.c.name == user)
        with self.database.transaction(reading=True) as connection:
            rows = connection.execute(wanted).mappings()
            return self.set_aside.readable("key", rows, _key_row)

    def key(self, prefix: str) -> KeyRow:
        """Raises NotThere."""
        with self.database.transaction(reading=True) as connection:
            return _key(connection, prefix)

    def find_keys(self, user: str | None, window: ListWindow) -> FoundRows[KeyRow]:
        """Keys of all users, or of one: those that are not revoked first, by user, the newest
        first. They are found by prefix, name and user."""
        named = [api_keys.c.prefix, api_keys.c.name, users.c.name]
        wanted = _keys_of_users().where(with_words(window.find, named))
        if user is not None:
            wanted = wanted.where(users.c.name == user)
        newest = api_keys.c.created.desc(), api_keys.c.id
        wanted = wanted.order_by(api_keys.c.revoked_at.is_not(None), users.c.name, *newest)
        return self._found("key", wanted, window, _key_row)

    def _found(
        self,
        kind: str,
        wanted: Select[Any],
        window: ListWindow,
        make: Callable[[RowMapping], Listed],
    ) -> FoundRows[Listed]:
        count = select(func.count()).select_from(wanted.order_by(None).subquery())
        with self.database.transaction(reading=True) as connection:
            total = int(connection.execute(count).scalar_one())
            rows = connection.execute(in_window(wanted, window)).mappings()
            return FoundRows(self.set_aside.readable(kind, rows, make), total)

    def create_key(
        self, user: str, name: str, terms: KeyTerms, actor: OrderActor
    ) -> tuple[KeyRow, str]:
        """Make a key; return it with what its user is shown, once. Raises NotThere, ConfigError."""
        check_terms(terms, self._clock())
        if len(name) > 128 or not name.isprintable():
            raise ConfigError(f"name is {name!r:.150}, must be at most 128 printable characters")
        with self.database.transaction() as connection:
            owner = _user(connection, user)
            if "admin" in terms.scopes and owner.role != "admin":
                raise ConfigError(f"scopes has admin, {user} is no admin")
            check_models(connection, terms.quotas)
            check_callable(fleet_in(connection, self.set_aside), terms.models or ())
            return self._add_key(connection, owner, name, terms, actor)

    def rotate_key(
        self, prefix: str, actor: OrderActor, *, keep_s: float = 0.0
    ) -> tuple[KeyRow, str]:
        """A new key with the terms of one; the old one is good for keep_s more.

        What the old one has used of its limits, the new one has. Raises NotThere, ConfigError.
        """
        if not 0 <= keep_s <= MOST_KEEP_S:
            raise ConfigError(f"keep_s is {keep_s:g}, must be 0 to {MOST_KEEP_S:g}")
        with self.database.transaction() as connection:
            old = self._living(connection, prefix)
            check_terms(old.terms, self._clock())
            owner = _user(connection, old.user)
            made = self._add_key(connection, owner, old.name, old.terms, actor, old.origin)
            if keep_s:
                ends = min(self._clock() + keep_s, old.terms.expires or float("inf"))
                self._end_key(connection, old, actor, expires=ends)
            else:
                self._end_key(connection, old, actor)
            return made

    def limit_key(self, prefix: str, limits: Mapping[str, Any], actor: OrderActor) -> KeyRow:
        """Change some of a key's limits: rpm, tpm, parallel, quota, period, and of quotas those of
        the models that are named (None: no more); what it has used stays.

        Those of keys that it was rotated from, and that still live, change with them.
        Raises NotThere, ConfigError.
        """
        with self.database.transaction() as connection:
            old = self._living(connection, prefix)
            new = changed(connection, old.terms, limits)
            before, after = (named_of(terms, limits) for terms in (old.terms, new))
            change = SpecChange("change", "key", prefix, before, after)
            version = self._note(connection, actor, change)
            together = select(api_keys.c.id, api_keys.c.terms).where(
                api_keys.c.origin == old.origin, api_keys.c.revoked_at.is_(None)
            )
            for key_id, terms in connection.execute(together).all():
                values = {"terms": {**terms, **after}, "version": version}
                connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(**values))
            return _key(connection, prefix)

    def revoke_key(self, prefix: str, actor: OrderActor) -> KeyRow:
        """Raises NotThere, also if the key was revoked before."""
        with self.database.transaction() as connection:
            old = self._living(connection, prefix)
            self._end_key(connection, old, actor)
            return _key(connection, prefix)

    def first_admin_key(self, keep: Callable[[str], object] = lambda key: None) -> str | None:
        """Create the user `admin` and a key, shown once, if there is no user yet. keep: writes the
        key down before it is valid: where that raises, nothing is created."""
        actor = OrderActor("first start")
        with self.database.transaction() as connection:
            if connection.execute(select(users.c.id).limit(1)).first() is not None:
                return None
            owner = self._add_user(connection, "admin", "admin", actor)
            shown = self._add_key(connection, owner, "first", ADMIN_TERMS, actor)[1]
            keep(shown)
            return shown

    def key_changes(self, since: int = 0) -> KeyChanges:
        """What has happened to keys since a version; since 0: all of them."""
        wanted = _keys_of_users().where(api_keys.c.version > since)
        with self.database.transaction(reading=True) as connection:
            rows = connection.execute(wanted).mappings().all()
            valid = [row for row in rows if row["revoked_at"] is None and not row["disabled"]]
            granted = remembered(self.set_aside.readable("key", valid, _grant), self._clock())
            known = {one.prefix for one in granted}  # one that can't be read lets nobody in
            revoked = tuple(row["prefix"] for row in rows if row["prefix"] not in known)
            return KeyChanges(_version(connection), tuple(granted), revoked)

    def _add_user(
        self, connection: Connection, name: str, role: Role, actor: OrderActor, subject: str = ""
    ) -> UserRow:
        if connection.execute(select(users.c.id).where(users.c.name == name)).first():
            raise NameTaken(f"a user {name!r} is there already")
        row = UserRow(
            user_id=_new_id(), name=name, role=role, disabled=False, created=self._clock(),
            subject=subject,
        )  # fmt: skip
        fields = msgspec.to_builtins(row)
        connection.execute(insert(users).values(id=fields.pop("user_id"), **fields))
        self._note(connection, actor, SpecChange("add", "user", name, None, {"role": role}))
        return row

    def _add_key(
        self,
        connection: Connection,
        owner: UserRow,
        name: str,
        terms: KeyTerms,
        actor: OrderActor,
        origin: str = "",
    ) -> tuple[KeyRow, str]:
        """origin: of the key that this one takes the place of; empty: of none."""
        made: NewKey = new_key(self._pepper)
        key_id = _new_id()
        kept = msgspec.to_builtins(terms)
        after = {"user": owner.name, "name": name, "terms": kept}
        version = self._note(connection, actor, SpecChange("add", "key", made.prefix, None, after))
        connection.execute(
            insert(api_keys).values(
                id=key_id,
                origin=origin or key_id,
                user_id=owner.user_id,
                name=name,
                prefix=made.prefix,
                hash=made.hash,
                terms=kept,
                created=self._clock(),
                version=version,
            )
        )
        return _key(connection, made.prefix), made.shown

    def _living(self, connection: Connection, prefix: str) -> KeyRow:
        found = _key(connection, prefix)
        if found.revoked_at is not None:
            raise NotThere(f"the key {prefix} has been revoked")
        return found

    def _end_key(
        self, connection: Connection, old: KeyRow, actor: OrderActor, expires: float | None = None
    ) -> None:
        """Revoke a key now, or let it expire."""
        values: dict[str, Any]
        if expires is None:
            values = {"revoked_at": self._clock()}
            change = SpecChange("revoke", "key", old.prefix, {"revoked_at": None}, dict(values))
        else:
            terms = msgspec.structs.replace(old.terms, expires=expires)
            values = {"terms": msgspec.to_builtins(terms)}
            before = {"expires": old.terms.expires}
            change = SpecChange("change", "key", old.prefix, before, {"expires": expires})
        values["version"] = self._note(connection, actor, change)
        connection.execute(update(api_keys).where(api_keys.c.id == old.key_id).values(**values))

    # -- what all orders do

    def _note(self, connection: Connection, actor: OrderActor, change: SpecChange) -> int:
        """The row of the audit that belongs to a change; the version that the change makes."""
        action = f"{change.kind}.{change.action}"
        order = AuditedOrder(action, change.name, change.before, change.after)
        return add_to_audit(connection, order, actor, self._clock())

    def _checked_pepper(self) -> bytes:
        """The pepper, which must be the one that the database's keys are hashed under."""
        with self.database.transaction() as connection:
            kept = kept_pepper(connection)
            pepper = read_pepper(self._pepper_file, make=kept is None)
            if kept is None:
                shown = shown_pepper(pepper)
                connection.execute(insert(meta).values(name="pepper", value=shown))
            else:
                check_pepper(self._pepper_file, pepper, kept, self.database.name)
        return pepper


def _new_id() -> str:
    """Text that sorts by the time it was made."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def _version(connection: Connection) -> int:
    return connection.scalar(select(func.max(audit.c.id))) or 0


# -- rows


def _named_row(
    connection: Connection, wanted: Select[Any], name: str, what: str, shown: int = 150
) -> RowMapping:
    """The row of that name. Raises NotThere, with `shown` characters of the name."""
    row = connection.execute(wanted).mappings().first() if NAME.fullmatch(name) else None
    if row is None:
        raise NotThere(f"no {what} {name[:shown]!r}")
    return row


def _model(connection: Connection, name: str) -> ModelRow:
    wanted = newest_models().where(models.c.name == name)
    return model_row(_named_row(connection, wanted, name, "model"))


def _revise(connection: Connection, name: str, spec: Any, author: str, now: float) -> None:
    """The newest revision of a model, which may be new."""
    found = connection.execute(
        select(models.c.id, models.c.revision).where(models.c.name == name)
    ).first()
    if found is None:
        model_id, number = _new_id(), 1
        connection.execute(
            insert(models).values(id=model_id, name=name, revision=1, enabled=True, created=now)
        )
    else:
        model_id, number = found[0], found[1] + 1
        connection.execute(update(models).where(models.c.id == model_id).values(revision=number))
    connection.execute(
        insert(revisions).values(model_id=model_id, n=number, spec=spec, author=author, created=now)
    )


def _user_row(row: RowMapping) -> UserRow:
    return UserRow(
        user_id=row["id"],
        name=row["name"],
        role=row["role"],
        disabled=row["disabled"],
        created=row["created"],
        limits=converted(row, "limits", AccountLimits),
        subject=row["subject"],
    )


def _changeable(user: UserRow) -> dict[str, Any]:
    """What an order may change of a user."""
    limits = msgspec.to_builtins(user.limits)
    return {"role": user.role, "disabled": user.disabled, "limits": limits}


def _user(connection: Connection, name: str) -> UserRow:
    wanted = select(users).where(users.c.name == name)
    return _user_row(_named_row(connection, wanted, name, "user"))


def _checked_role(role: str) -> Role:
    if role not in ROLES:
        raise ConfigError(f"role is {role!r:.100}, must be {' or '.join(ROLES)}")
    return "admin" if role == "admin" else "user"


def _keys_of_users() -> Select[Any]:
    of_users = (users.c.name.label("user"), users.c.role, users.c.disabled, users.c.limits)
    return select(api_keys, *of_users).join(users, users.c.id == api_keys.c.user_id)


def _key_row(row: RowMapping) -> KeyRow:
    return KeyRow(
        key_id=row["id"],
        prefix=row["prefix"],
        name=row["name"],
        user=row["user"],
        terms=converted(row, "terms", KeyTerms),
        created=row["created"],
        revoked_at=row["revoked_at"],
        origin=row["origin"],
    )


def _key(connection: Connection, prefix: str) -> KeyRow:
    wanted = _keys_of_users().where(api_keys.c.prefix == prefix)
    return _key_row(_named_row(connection, wanted, prefix, "key", 50))


def _grant(row: RowMapping) -> KeyGrant:
    """An admin who is one no more has no admin's keys."""
    terms = dict(row["terms"])
    if row["role"] != "admin":
        terms["scopes"] = [scope for scope in terms["scopes"] if scope != "admin"]
    return msgspec.convert(
        {
            **terms,
            "key_id": row["id"],
            "origin": row["origin"],
            "user_id": row["user_id"],
            "user": row["user"],
            "user_limits": row["limits"],
            "prefix": row["prefix"],
            "hash": row["hash"],
        },
        KeyGrant,
    )
