"""`kvmig model`, `kvmig alias` and `kvmig placement`."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from kvmig.cli.common import Json, done, patience, said, show, table_of, time_of, where
from kvmig.core.errors import ConfigError
from kvmig.fleet.spec import PATH
from kvmig.placement.file import Placement

model_app = typer.Typer(help="Models of the catalogue.", no_args_is_help=True)
alias_app = typer.Typer(help="Names that stand for models by weights.", no_args_is_help=True)
placement_app = typer.Typer(help="Which models share a unit.", no_args_is_help=True)

CHECKING = (
    "the engine reads the flags and the model's configuration; its first time it loads its"
    " libraries, which takes some 20 s or more"
)

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
    )


MODEL_COLUMNS = ("model", "state", "instances", "running", "held", "revision")


def show_rows(answer: Any, as_json: bool) -> None:
    """Models, and below them in whole sentences what is wrong with some."""
    rows = answer.get("data", [answer])
    show(answer, as_json, lambda _: table_of(MODEL_COLUMNS, map(model_row, rows)))
    if not as_json:
        for one in rows:
            if one["why"]:
                print(f"{one['name']}: {one['why']}")


def model_view(one: dict[str, Any]) -> str:
    """One model for people."""
    spec = one["spec"]
    wanted = spec["instances"]
    started = "" if one["start_s"] is None else f", last started in {one['start_s']:.1f} s"
    pairs = {
        "state": f"{one['state']}{'' if one['on'] else ' (off)'}{started}",
        "why": one["why"],
        "instances": f"{one['serving']} serve, {wanted['min']} to {wanted['max']} wanted",
        "requests": f"{one['running']} run, {one['held']} wait for a start",
        "source": spec["source"],
        "engine": spec["engine"],
        "flags": shlex.join(spec["flags"]),
        "aliases": ", ".join(spec["aliases"]),
        "adapters": ", ".join(spec["adapters"]),
        "zero after": f"{wanted['zero_after_s']:g} s",
        "revision": f"{one['revision']}{', takes effect at the next start' * one['stale']}",
    }
    lines = [f"{name:<11} {value}" for name, value in pairs.items() if value]
    events = [
        f"  {time_of(event.get('at'))}  "
        + " ".join(
            str(value) for name, value in event.items() if name not in ("at", "model") and value
        )
        for event in one.get("events", ())[-10:]
    ]
    return "\n".join([one["name"], *lines, *(["decided:", *events] if events else [])])


@model_app.command("ls")
@said
def list_models(as_json: Json = False) -> None:
    """All models."""
    show_rows(where.client().get("models"), as_json)


@model_app.command("add")
@said
def add_model(
    name: str,
    source: Annotated[str, typer.Argument(help="path:FOLDER with the weights.")],
    engine: Annotated[
        str, typer.Option(help="vllm, transformers, or toy, which computes nothing.")
    ] = "vllm",
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
    with patience(CHECKING):
        answer = where.client().post("models", spec)
    show_rows(answer, as_json)


@model_app.command("set")
@said
def set_model(
    name: str,
    flags: Annotated[str | None, typer.Option(help="The engine's flags, as one text.")] = None,
    source: Annotated[str | None, typer.Option(help="path:FOLDER with the weights.")] = None,
    zero_after: Annotated[float | None, typer.Option(help="Seconds without a request.")] = None,
    as_json: Json = False,
) -> None:
    """Change a model; flags and source take effect with its next start."""
    client = where.client()
    spec = client.get(f"models/{quote(name)}")["spec"]
    if flags is not None:
        spec["flags"] = shlex.split(flags)
    if source is not None:
        spec["source"] = PATH + str(Path(source.removeprefix(PATH)).absolute())
    if zero_after is not None:
        spec["instances"]["zero_after_s"] = zero_after
    with patience(CHECKING):
        client.post("apply", {"fleet": {"models": [spec]}})
    show_rows(client.get(f"models/{quote(name)}"), as_json)


@model_app.command("show")
@said
def show_model(name: str, as_json: Json = False) -> None:
    """One model: its specification, how it stands, what was decided; --json: its revisions, too."""
    show(where.client().get(f"models/{quote(name)}"), as_json, model_view)


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
    show_rows(answer, as_json)


@model_app.command("on")
@said
def switch_on(name: str, as_json: Json = False) -> None:
    """Let it serve again."""
    done(where.client().post(f"models/{quote(name)}/switch", {"on": True}), as_json)


@model_app.command("off")
@said
def switch_off(name: str, as_json: Json = False) -> None:
    """Take no new requests; it ends after its last stream, and stays in the catalogue."""
    done(where.client().post(f"models/{quote(name)}/switch", {"on": False}), as_json)


@model_app.command("wake")
@said
def wake_model(name: str, as_json: Json = False) -> None:
    """Start it now, also where a start has failed."""
    done(where.client().post(f"models/{quote(name)}/wake"), as_json)


@model_app.command("rm")
@said
def remove_model(name: str, as_json: Json = False) -> None:
    """Take it out of the catalogue; its requests end first."""
    done(where.client().delete(f"models/{quote(name)}"), as_json)


@model_app.command("logs")
@said
def logs_of_model(
    name: str,
    lines: Annotated[int, typer.Option("-n", help="So many of its last.")] = 50,
    as_json: Json = False,
) -> None:
    """What its processes have printed."""
    answer = where.client().get(f"models/{quote(name)}/logs", lines=lines)
    show(answer, as_json, lambda found: "\n".join(found["data"]))


# -- aliases


@alias_app.command("set")
@said
def set_alias(
    name: str,
    models: Annotated[list[str], typer.Argument(help="MODEL, or MODEL=WEIGHT of each.")],
    as_json: Json = False,
) -> None:
    """Let a name stand for models."""
    targets = {}
    for model in models:
        target, _, weight = model.partition("=")
        if not (weight or "1").isdecimal():
            raise ConfigError(f"the weight of {target} is {weight!r}, must be a whole number")
        targets[target] = int(weight or 1)
    done(where.client().put(f"aliases/{quote(name)}", {"targets": targets}), as_json)


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
def remove_alias(name: str, as_json: Json = False) -> None:
    """Let it stand for nothing."""
    done(where.client().delete(f"aliases/{quote(name)}"), as_json)


# -- the placement


@placement_app.command("set")
@said
def set_placement(
    file: Annotated[Path, typer.Argument(help="As `python -m kvmig.placement --out` writes it.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan.")] = False,
    as_json: Json = False,
) -> None:
    """Take the models that run there while they serve; prints the plan."""
    try:
        given = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    answer = where.client().put("placement", {"placement": given, "dry_run": dry_run})
    show(answer, as_json, lambda found: "\n".join(found["plan"]))


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
def remove_placement(as_json: Json = False) -> None:
    """Want none: models' own rules say how many instances there are."""
    done(where.client().delete("placement"), as_json)
