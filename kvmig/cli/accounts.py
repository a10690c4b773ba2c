"""`kvmig user` and `kvmig key`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvmig.cli.client import path_part
from kvmig.cli.common import Json, done, said, show, show_table, time_of, where
from kvmig.core.errors import ConfigError

key_app = typer.Typer(help="Manage API keys.", no_args_is_help=True)
user_app = typer.Typer(help="Manage users, who own API keys.", no_args_is_help=True)


@user_app.command("add")
@said
def add_user(
    name: str,
    role: Annotated[str, typer.Option(help="Role of the user: user or admin.")] = "user",
    as_json: Json = False,
) -> None:
    """Add a user."""
    done(where.client().post("users", {"name": name, "role": role}), as_json)


@user_app.command("set")
@said
def set_user(
    name: str,
    role: Annotated[str | None, typer.Option(help="Role of the user: user or admin.")] = None,
    disabled: Annotated[
        bool | None,
        typer.Option("--disable/--enable", help="Refuse or accept all keys of the user."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Change a user. Users are never deleted, since usage records name them: use --disable."""
    changed = {"role": role, "disabled": disabled}
    done(where.client().patch(f"users/{path_part(name)}", changed), as_json)


@user_app.command("ls")
@said
def list_users(as_json: Json = False) -> None:
    """List all users."""
    show_table(where.client().get("users"), as_json, ("user", "role", "limits", ""), user_row)


def user_row(one: dict[str, Any]) -> Sequence[object]:
    """A row of `kvmig user ls`."""
    disabled = "disabled" if one["disabled"] else None
    return one["name"], one["role"], limits_of(one["limits"]), disabled


Rpm = Annotated[int | None, typer.Option(help="Requests per minute; 0: no limit.")]
Tpm = Annotated[int | None, typer.Option(help="Tokens per minute; 0: no limit.")]
Parallel = Annotated[int | None, typer.Option(help="Concurrent requests; 0: no limit.")]
Quota = Annotated[int | None, typer.Option(help="Tokens per period; 0: no limit.")]
Period = Annotated[str | None, typer.Option(help="Period of the quota: day, month or total.")]
ModelQuotas = Annotated[
    list[str] | None,
    typer.Option(
        help="Token quota for one model, as MODEL=TOKENS or MODEL=TOKENS/PERIOD; 0: no limit."
    ),
]


def add_limit_command(app: typer.Typer, path: str, name: str, shown: str, text: str) -> None:
    """path: of the API. name: of what it takes. shown: where a row has its limits."""

    def limit(
        whose: str,
        rpm: Rpm = None,
        tpm: Tpm = None,
        parallel: Parallel = None,
        quota: Quota = None,
        period: Period = None,
        model_quota: ModelQuotas = None,
        as_json: Json = False,
    ) -> None:
        body = changed_limits(period, model_quota, rpm=rpm, tpm=tpm, parallel=parallel, quota=quota)
        row = where.client().patch(f"{path}/{path_part(whose)}", body)
        show(row, as_json, lambda found: limits_of(found[shown]) or "no limits")

    limit.__annotations__["whose"] = Annotated[str, typer.Argument(metavar=name)]
    app.command("limit", help=text)(said(limit))


add_limit_command(
    user_app, "users", "name", "limits",
    "Change the limits that all keys of a user share. Limits that are not given stay the same.",
)  # fmt: skip


def changed_limits(
    period: str | None, of_models: list[str] | None, **numbers: int | None
) -> dict[str, Any]:
    """A body that names what changes; 0: no limit."""
    body: dict[str, Any] = {name: n or None for name, n in numbers.items() if n is not None}
    if period is not None:
        body["period"] = period
    return {**body, "quotas": model_quotas(of_models)} if of_models else body


def model_quotas(given: list[str] | None) -> dict[str, dict[str, Any] | None]:
    """Parse `--model-quota`. Raises ConfigError."""
    found: dict[str, dict[str, Any] | None] = {}
    for one in given or ():
        model, equals, said = one.rpartition("=")
        tokens, slash, period = said.partition("/")
        if not (model and equals and tokens.removeprefix("-").isdecimal()):
            raise ConfigError(
                f"--model-quota is {one!r}, must be MODEL=TOKENS or MODEL=TOKENS/PERIOD"
            )
        quota = {"tokens": int(tokens), "period": period if slash else "month"}
        found[model] = quota if int(tokens) else None
    return found


@key_app.command("add")
@said
def add_key(
    user: str,
    name: Annotated[str, typer.Option(help="Name that describes the key's purpose.")] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model that the key may use (default: all). May be given several times."),
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Scope of the key: infer, read or admin (default: infer). May be given several"
            " times."
        ),
    ] = None,
    cidr: Annotated[
        list[str] | None,
        typer.Option(
            help="Network (CIDR) that may use the key (default: any). May be given several times."
        ),
    ] = None,
    priority_class: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            help="Priority class that the key may use (default: all). May be given several times.",
        ),
    ] = None,
    days: Annotated[float, typer.Option(help="Days until the key expires; 0: never.")] = 0.0,
    rpm: Annotated[int | None, typer.Option(help="Requests per minute.")] = None,
    tpm: Annotated[int | None, typer.Option(help="Tokens per minute.")] = None,
    parallel: Annotated[int | None, typer.Option(help="Concurrent requests.")] = None,
    quota: Annotated[int | None, typer.Option(help="Tokens per period, enforced exactly.")] = None,
    period: Annotated[
        str, typer.Option(help="Period of the quota: day, month or total.")
    ] = "month",
    model_quota: ModelQuotas = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    body = {
        "user": user,
        "name": name,
        "models": model,
        "scopes": scope or ["infer"],
        "cidrs": cidr,
        "classes": priority_class,
        "days": days,
        "rpm": rpm,
        "tpm": tpm,
        "parallel": parallel,
        "quota": quota,
        "period": period,
        "quotas": model_quotas(model_quota),
    }
    show(where.client().post("keys", body), as_json, lambda found: str(found["key"]))


@key_app.command("ls")
@said
def list_keys(
    left: Annotated[bool, typer.Option("--left", help="Also show the remaining quotas.")] = False,
    as_json: Json = False,
) -> None:
    """List keys by prefix: all of them, or with a key of scope read those of its user."""
    columns: tuple[str, ...] = (
        "prefix",
        "user",
        "name",
        "scopes",
        "models",
        "limits",
        "expires",
        "revoked",
    )
    answer = where.client().get("keys", left=left)
    if left:
        columns = (*columns, "left")
    show_table(answer, as_json, columns, key_row)


def key_row(one: dict[str, Any]) -> Sequence[object]:
    """A row of `kvmig key ls`."""
    terms = one["terms"]
    models = None if terms["models"] is None else " ".join(terms["models"])
    ends = [time_of(at) for at in (terms["expires"], one["revoked_at"])]
    scopes = " ".join(terms["scopes"])
    left = [left_of(one["left"])] if "left" in one else []
    classes = terms.get("classes")
    limits = limits_of(terms)
    if classes is not None:
        limits = ", ".join([*([limits] if limits else []), f"classes {' '.join(classes)}"])
    return one["prefix"], one["user"], one["name"], scopes, models, limits, *ends, *left


def left_of(quotas: Sequence[dict[str, Any]]) -> str | None:
    """What is left of each, the key's own and those of its user."""
    named = [
        f"{one['left']} of the {one['whose']}'s {one['tokens']}/{one['period']}"
        + (f" of {one['model']}" if one["model"] else "")
        for one in quotas
    ]
    return ", ".join(named) or None


def limits_of(terms: dict[str, Any]) -> str | None:
    """The limits that are set, as `kvmig key limit` and `kvmig user limit` take them."""
    named = [f"{name} {terms[name]}" for name in ("rpm", "tpm", "parallel") if terms[name]]
    if terms["quota"]:
        named.append(f"quota {terms['quota']}/{terms['period']}")
    for model, quota in terms["quotas"].items():
        named.append(f"quota of {model} {quota['tokens']}/{quota['period']}")
    return ", ".join(named) or None


add_limit_command(
    key_app,
    "keys",
    "prefix",
    "terms",
    "Change the limits of a key. Limits that are not given stay the same.",
)


@key_app.command("rotate")
@said
def rotate_key(
    prefix: str,
    keep: Annotated[float, typer.Option(help="Seconds that the old key stays valid.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Replace a key by a new one with the same rights. The old one ends now, or after --keep."""
    answer = where.client().post(f"keys/{path_part(prefix)}/rotate?keep_s={keep:g}")
    show(answer, as_json, lambda found: str(found["key"]))


@key_app.command("revoke")
@said
def revoke_key(prefix: str, as_json: Json = False) -> None:
    """Revoke a key. All proxies refuse it within a second, and its running calls end."""
    done(where.client().delete(f"keys/{path_part(prefix)}"), as_json)
