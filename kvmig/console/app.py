"""The command `kvmig`: starts a fleet, and talks to one that runs."""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvmig.cli.environment import cores
from kvmig.console.client import KEY, Client, Failed
from kvmig.fleet.settings import FleetSettings, check_settings, data_folder
from kvmig.fleet.spec import PATH, read_yaml
from kvmig.ground.errors import ConfigError, KvmigError
from kvmig.placement.file import Placement

Parameters = ParamSpec("Parameters")

app = typer.Typer(
    help="Many models behind one door: each from zero, moved live, with keys.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models of the catalogue.", no_args_is_help=True)
key_app = typer.Typer(help="Keys of the API.", no_args_is_help=True)
user_app = typer.Typer(help="Users, who have keys.", no_args_is_help=True)
alias_app = typer.Typer(help="Names that stand for models by weights.", no_args_is_help=True)
placement_app = typer.Typer(help="Which models share a unit.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(alias_app, name="alias")
app.add_typer(placement_app, name="placement")
app.add_typer(key_app, name="key")
app.add_typer(user_app, name="user")

DATABASE = "KVMIG_DATABASE"
"""Environment variable: the URL of `kvmig up --database`."""
out = Console(highlight=False, markup=False)
Json = Annotated[bool, typer.Option("--json", help="Print the server's answer as it is.")]


@dataclass
class Where:
    """The fleet that the command is for."""

    data: str = ""
    url: str = ""
    key: str = ""

    def client(self) -> Client:
        """Of its server."""
        settings = FleetSettings(data=data_folder(self.data))
        return Client(str(settings.api), self.url, self.key)

    def admin_key(self) -> str:
        """A key for the door, as the fleet's folder has it where none is given."""
        try:
            return self.key or Path(data_folder(self.data), "admin-key").read_text().strip()
        except OSError:
            return ""


where = Where()


@app.callback()
def common(
    data: Annotated[str, typer.Option(help="The fleet's folder; KVMIG_DATA.")] = "",
    url: Annotated[str, typer.Option(help="The door of a fleet elsewhere; KVMIG_URL.")] = "",
    key: Annotated[str, typer.Option(help="A key of an admin, for it; KVMIG_KEY.")] = "",
) -> None:
    """Take what all commands have in common."""
    where.data, where.url, where.key = data, url, key


def said(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """A command whose errors are one sentence: exit code 2 for bad input, 1 for the rest."""

    @wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except ConfigError as error:
            print(f"kvmig: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        except KvmigError as error:
            print(f"kvmig: {error}", file=sys.stderr)
            raise typer.Exit(1) from error

    return run


def show(answer: Any, as_json: bool, table: Callable[[Any], Table]) -> None:
    """Print an answer for people, or as it is."""
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        out.print(table(answer))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Rows under names."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*("-" if one is None else str(one) for one in row))
    return table


# -- the fleet


@app.command()
@said
def up(
    host: Annotated[str, typer.Option(help="Address that clients connect to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 8080,
    proxies: Annotated[int, typer.Option(help="Processes that take clients.")] = 1,
    database: Annotated[
        str,
        typer.Option(
            envvar=DATABASE,
            help="URL of a PostgreSQL database (default: SQLite in the folder). With a password: in"
            " KVMIG_DATABASE, for every user of a host can read flags.",
        ),
    ] = "",
    threads: Annotated[
        int, typer.Option(help="Cores of an instance on a CPU (default: half of them).")
    ] = 0,
    memory: Annotated[
        int, typer.Option(help="Bytes that all models may take (default: all that there are).")
    ] = 0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that a stop lets running requests finish.")
    ] = 30.0,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may call models, as https://chat.example.com; * for all"
            " (default: none). May be given several times."
        ),
    ] = None,
) -> None:
    """Serve a fleet until Ctrl-C."""
    from kvmig.fleet.init import up as run

    for secret in (DATABASE, KEY):  # models' processes need neither
        os.environ.pop(secret, None)
    settings = FleetSettings(
        data=data_folder(where.data),
        host=host,
        port=port,
        proxies=proxies,
        database=database,
        threads=threads or max(1, cores() // 2),
        memory=memory,
        shutdown_timeout_s=shutdown_timeout,
        allowed_origins=tuple(allowed_origins or ()),
    )
    status = run(check_settings(settings))
    if status:
        raise typer.Exit(status)


@app.command()
@said
def status(as_json: Json = False) -> None:
    """The fleet at a glance."""
    show(where.client().get("status"), as_json, lambda found: table_of(["", ""], found.items()))


@app.command()
@said
def apply(
    file: Annotated[Path, typer.Argument(help="YAML: models, aliases.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove models that the file doesn't name.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make the catalogue what a file says."""
    try:
        given = read_yaml(file.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{file} can't be used: {error}") from error
    body = {
        "fleet": given,
        "folder": str(file.absolute().parent),
        "dry_run": dry_run,
        "prune": prune,
    }
    answer = where.client().post("apply", body)
    show(
        answer,
        as_json,
        lambda found: table_of(
            ["", "", "name"], [(one["action"], one["kind"], one["name"]) for one in found["data"]]
        ),
    )


@app.command()
@said
def audit(
    limit: Annotated[int, typer.Option(help="Rows, the newest ones.")] = 20, as_json: Json = False
) -> None:
    """Who changed what, from where; the newest first."""
    show(
        where.client().get("audit", limit=limit),
        as_json,
        lambda found: table_of(
            ["at", "who", "from", "what", ""],
            [
                (time_of(one["at"]), one["actor"], one["address"], one["action"], one["object"])
                for one in found["data"]
            ],
        ),
    )


@app.command()
@said
def usage(
    by: Annotated[str, typer.Option(help="Some of key, user, model, day.")] = "model",
    since: Annotated[str, typer.Option(help="First day, as 2026-11-01 (UTC).")] = "",
    until: Annotated[str, typer.Option(help="Last day.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Json = False,
) -> None:
    """Calls and tokens; the largest first."""
    answer = where.client().get("usage", by=by, since=since, until=until)
    columns = [*(one for one in by.split(",") if one), "calls", "prompt", "cached", "output"]
    rows = [[one[name] for name in columns] for one in answer["data"]]
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(columns)
        writer.writerows(rows)
    else:
        show(answer, as_json, lambda _: table_of(columns, rows))


@app.command()
@said
def backup(file: Annotated[Path, typer.Argument(help="Where the copy goes.")]) -> None:
    """Copy the database while the fleet runs."""
    where.client().post("backup", {"path": str(file.absolute())})
    out.print(f"{file} holds the catalogue, the users and the keys (hashed)")


@app.command()
@said
def chat(
    model: str,
    prompt: Annotated[str, typer.Argument(help="Or from the keyboard.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 1000,
) -> None:
    """Talk to a model through the door; one that is cold starts."""
    client = where.client()
    address = where.url or client.get("status")["address"]
    door = Client("", address, where.admin_key())
    messages: list[dict[str, str]] = []
    while True:
        text = prompt or ask()
        if not text:
            return
        messages.append({"role": "user", "content": text})
        answer = "".join(said_by(door, model, messages, max_tokens))
        messages.append({"role": "assistant", "content": answer})
        if prompt:
            return


def ask() -> str:
    """A line of the keyboard, or of a pipe; empty at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return ""


def said_by(
    door: Client, model: str, messages: list[dict[str, str]], max_tokens: int
) -> Iterable[str]:
    """What comes, printed as it comes. Raises Failed."""
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": max_tokens}
    for line in door.stream("/v1/chat/completions", body):
        if line.startswith(": "):  # a sign of life: how far a cold model's start is
            print(line.removeprefix(": "), file=sys.stderr)
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        found = json.loads(line.removeprefix("data: "))
        if "error" in found:
            raise Failed(str(found["error"].get("message", found["error"])))
        for choice in found.get("choices", []):
            if text := choice["delta"].get("content"):
                print(text, end="", flush=True)
                yield text
    print()


# -- models


def model_row(one: dict[str, Any]) -> Sequence[object]:
    """Of `kvmig model ls`."""
    wanted = one["spec"]["instances"]
    return (
        one["name"],
        one["state"],
        f"{one['serving']} of {wanted['min']}-{wanted['max']}",
        one["running"],
        one["held"],
        one["revision"],
        one["why"] or "",
    )


MODEL_COLUMNS = ("model", "state", "instances", "running", "held", "revision", "")


@model_app.command("ls")
@said
def list_models(as_json: Json = False) -> None:
    """All models."""
    show(
        where.client().get("models"),
        as_json,
        lambda found: table_of(MODEL_COLUMNS, map(model_row, found["data"])),
    )


@model_app.command("add")
@said
def add_model(
    name: str,
    source: Annotated[str, typer.Argument(help="path:FOLDER with the weights.")],
    engine: Annotated[str, typer.Option(help="vllm or transformers.")] = "vllm",
    flags: Annotated[str, typer.Option(help="The engine's flags, as one text.")] = "",
    least: Annotated[int, typer.Option("--min", help="Instances at least; 0: from zero.")] = 0,
    most: Annotated[int, typer.Option("--max", help="Instances at most.")] = 1,
    target: Annotated[float, typer.Option(help="Requests at once for an instance.")] = 8.0,
    target_kind: Annotated[str, typer.Option(help="concurrency, rps or freeness.")] = "concurrency",
    zero_after: Annotated[float, typer.Option(help="Seconds without a request.")] = 300.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds for a start.")] = 600.0,
    alias: Annotated[list[str] | None, typer.Option(help="Another name of it.")] = None,
    as_json: Json = False,
) -> None:
    """Put a model into the catalogue; it starts when somebody asks for it, or with --min."""
    folder = source.removeprefix(PATH)
    spec = {
        "name": name,
        "source": PATH + str(Path(folder).absolute()) if ":" not in folder else source,
        "engine": engine,
        "flags": shlex.split(flags),
        "aliases": alias or [],
        "instances": {
            "min": least,
            "max": most,
            "target": target,
            "target_kind": target_kind,
            "zero_after_s": zero_after,
            "start_timeout_s": start_timeout,
        },
    }
    answer = where.client().post("models", spec)
    show(answer, as_json, lambda found: table_of(MODEL_COLUMNS, [model_row(found)]))


@model_app.command("show")
@said
def show_model(name: str) -> None:
    """One model: its specification, its revisions, what was decided."""
    print(json.dumps(where.client().get(f"models/{quote(name)}"), indent=2))


@model_app.command("scale")
@said
def scale_model(
    name: str,
    least: Annotated[int, typer.Option("--min")],
    most: Annotated[int, typer.Option("--max")],
    as_json: Json = False,
) -> None:
    """Set how many instances it has at least and at most."""
    answer = where.client().post(f"models/{quote(name)}/scale", {"min": least, "max": most})
    show(answer, as_json, lambda found: table_of(MODEL_COLUMNS, [model_row(found)]))


@model_app.command("on")
@said
def switch_on(name: str) -> None:
    """Let it serve again."""
    where.client().post(f"models/{quote(name)}/switch", {"on": True})


@model_app.command("off")
@said
def switch_off(name: str) -> None:
    """Take no new requests; it ends after its last stream, and stays in the catalogue."""
    where.client().post(f"models/{quote(name)}/switch", {"on": False})


@model_app.command("wake")
@said
def wake_model(name: str) -> None:
    """Start it now, also where a start has failed."""
    where.client().post(f"models/{quote(name)}/wake")


@model_app.command("rm")
@said
def remove_model(name: str) -> None:
    """Take it out of the catalogue; its requests end first."""
    where.client().delete(f"models/{quote(name)}")


@model_app.command("logs")
@said
def logs_of_model(
    name: str, lines: Annotated[int, typer.Option("-n", help="So many of its last.")] = 50
) -> None:
    """What its processes have printed."""
    for line in where.client().get(f"models/{quote(name)}/logs", lines=lines)["data"]:
        print(line)


# -- aliases


@alias_app.command("set")
@said
def set_alias(
    name: str,
    models: Annotated[list[str], typer.Argument(help="MODEL, or MODEL=WEIGHT of each.")],
) -> None:
    """Let a name stand for models."""
    targets = {}
    for model in models:
        target, _, weight = model.partition("=")
        if not (weight or "1").isdecimal():
            raise ConfigError(f"the weight of {target} is {weight!r}, must be a whole number")
        targets[target] = int(weight or 1)
    where.client().put(f"aliases/{quote(name)}", {"targets": targets})


@alias_app.command("ls")
@said
def list_aliases(as_json: Json = False) -> None:
    """All of them."""
    show(
        where.client().get("aliases"),
        as_json,
        lambda found: table_of(
            ["alias", "models"],
            [
                (name, ", ".join(f"{model}={weight}" for model, weight in targets.items()))
                for name, targets in found["data"].items()
            ],
        ),
    )


@alias_app.command("rm")
@said
def remove_alias(name: str) -> None:
    """Let it stand for nothing."""
    where.client().delete(f"aliases/{quote(name)}")


# -- the placement


@placement_app.command("set")
@said
def set_placement(
    file: Annotated[Path, typer.Argument(help="As `python -m kvmig.place --out` writes it.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan.")] = False,
) -> None:
    """Take the models that run there while they serve; prints the plan."""
    try:
        given = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    answer = where.client().put("placement", {"placement": given, "dry_run": dry_run})
    print("\n".join(answer["plan"]))


@placement_app.command("show")
@said
def show_placement(as_json: Json = False) -> None:
    """The one that is wanted, whether it is reached, and what was done for it."""
    found = where.client().get("placement")
    wanted = msgspec.convert(found["placement"] or {"units": []}, Placement)
    rows = [(one.called, ", ".join(each.name for each in one.models)) for one in wanted.units]
    show(found, as_json, lambda _: table_of(["unit", "models"], rows))
    if not as_json:
        state = " ".join(filter(None, (found["state"], found["why"])))
        print("\n".join([*found["lines"], state]))


@placement_app.command("rm")
@said
def remove_placement() -> None:
    """Want none: models' own rules say how many instances there are."""
    where.client().delete("placement")


# -- users and keys


@user_app.command("add")
@said
def add_user(name: str, role: Annotated[str, typer.Option(help="user or admin.")] = "user") -> None:
    """Make a user."""
    where.client().post("users", {"name": name, "role": role})


@user_app.command("set")
@said
def set_user(
    name: str,
    role: Annotated[str | None, typer.Option(help="user or admin.")] = None,
    disabled: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Refuse all their keys, or not.")
    ] = None,
) -> None:
    """Change a user."""
    where.client().patch(f"users/{quote(name)}", {"role": role, "disabled": disabled})


@user_app.command("ls")
@said
def list_users(as_json: Json = False) -> None:
    """All users."""
    show(
        where.client().get("users"),
        as_json,
        lambda found: table_of(
            ["user", "role", "limits", ""],
            [
                (
                    one["name"],
                    one["role"],
                    limits_of(one["limits"]),
                    "disabled" if one["disabled"] else None,
                )
                for one in found["data"]
            ],
        ),
    )


Rpm = Annotated[int | None, typer.Option(help="Requests a minute; 0: no limit.")]
Tpm = Annotated[int | None, typer.Option(help="Tokens a minute; 0: no limit.")]
Parallel = Annotated[int | None, typer.Option(help="Requests at once; 0: no limit.")]
Quota = Annotated[int | None, typer.Option(help="Tokens a period; 0: no limit.")]
Period = Annotated[str | None, typer.Option(help="day, month or total.")]
ModelQuotas = Annotated[
    list[str] | None,
    typer.Option(help="Tokens of one model: MODEL=TOKENS or MODEL=TOKENS/PERIOD; 0: no limit."),
]


@user_app.command("limit")
@said
def limit_user(
    name: str,
    rpm: Rpm = None,
    tpm: Tpm = None,
    parallel: Parallel = None,
    quota: Quota = None,
    period: Period = None,
    model_quota: ModelQuotas = None,
) -> None:
    """Change limits of all keys of a user together; those that aren't named stay."""
    body = changed_limits(period, model_quota, rpm=rpm, tpm=tpm, parallel=parallel, quota=quota)
    row = where.client().patch(f"users/{quote(name)}", body)
    print(limits_of(row["limits"]) or "no limits")


def changed_limits(
    period: str | None, of_models: list[str] | None, **numbers: int | None
) -> dict[str, Any]:
    """A body that names what changes; 0: no limit."""
    body: dict[str, Any] = {name: n or None for name, n in numbers.items() if n is not None}
    if period is not None:
        body["period"] = period
    return {**body, "quotas": model_quotas(of_models)} if of_models else body


def model_quotas(given: list[str] | None) -> dict[str, dict[str, Any] | None]:
    """Of `--model-quota`. Raises ConfigError."""
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
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    model: Annotated[list[str] | None, typer.Option(help="Only these; else all.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="infer, read, admin.")] = None,
    cidr: Annotated[list[str] | None, typer.Option(help="Only from these networks.")] = None,
    days: Annotated[float, typer.Option(help="Until it expires; 0: never.")] = 0.0,
    rpm: Annotated[int | None, typer.Option(help="Requests a minute.")] = None,
    tpm: Annotated[int | None, typer.Option(help="Tokens a minute.")] = None,
    parallel: Annotated[int | None, typer.Option(help="Requests at once.")] = None,
    quota: Annotated[int | None, typer.Option(help="Tokens a period; not one more.")] = None,
    period: Annotated[str, typer.Option(help="Of the quota: day, month or total.")] = "month",
    model_quota: ModelQuotas = None,
) -> None:
    """Make a key; it is shown this once."""
    body = {
        "user": user,
        "name": name,
        "models": model,
        "scopes": scope or ["infer"],
        "cidrs": cidr,
        "days": days,
        "rpm": rpm,
        "tpm": tpm,
        "parallel": parallel,
        "quota": quota,
        "period": period,
        "quotas": model_quotas(model_quota),
    }
    print(where.client().post("keys", body)["key"])


@key_app.command("ls")
@said
def list_keys(as_json: Json = False) -> None:
    """All keys, by their prefixes."""
    columns = ("prefix", "user", "name", "scopes", "models", "limits", "expires", "revoked")
    show(
        where.client().get("keys"),
        as_json,
        lambda found: table_of(columns, map(key_row, found["data"])),
    )


def time_of(at: float | None) -> str | None:
    """A Unix time, for people."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(" ", "seconds")


def key_row(one: dict[str, Any]) -> Sequence[object]:
    """Of `kvmig key ls`."""
    terms = one["terms"]
    models = None if terms["models"] is None else " ".join(terms["models"])
    ends = [time_of(at) for at in (terms["expires"], one["revoked_at"])]
    scopes = " ".join(terms["scopes"])
    return one["prefix"], one["user"], one["name"], scopes, models, limits_of(terms), *ends


def limits_of(terms: dict[str, Any]) -> str | None:
    """Those that there are, as `kvmig key limit` and `kvmig user limit` take them."""
    named = [f"{name} {terms[name]}" for name in ("rpm", "tpm", "parallel") if terms[name]]
    if terms["quota"]:
        named.append(f"quota {terms['quota']}/{terms['period']}")
    for model, quota in terms["quotas"].items():
        named.append(f"quota of {model} {quota['tokens']}/{quota['period']}")
    return ", ".join(named) or None


@key_app.command("limit")
@said
def limit_key(
    prefix: str,
    rpm: Rpm = None,
    tpm: Tpm = None,
    parallel: Parallel = None,
    quota: Quota = None,
    period: Period = None,
    model_quota: ModelQuotas = None,
) -> None:
    """Change limits of a key; those that aren't named stay."""
    body = changed_limits(period, model_quota, rpm=rpm, tpm=tpm, parallel=parallel, quota=quota)
    row = where.client().patch(f"keys/{quote(prefix)}", body)
    print(limits_of(row["terms"]) or "no limits")


@key_app.command("rotate")
@said
def rotate_key(
    prefix: str,
    keep: Annotated[float, typer.Option(help="Seconds that the old one is good for.")] = 0.0,
) -> None:
    """Make another key with the same rights; the old one is refused, at once or after --keep."""
    print(where.client().post(f"keys/{quote(prefix)}/rotate?keep_s={keep:g}")["key"])


@key_app.command("revoke")
@said
def revoke_key(prefix: str) -> None:
    """Refuse it everywhere, within a second."""
    where.client().delete(f"keys/{quote(prefix)}")


def main() -> None:
    """The command."""
    app()
