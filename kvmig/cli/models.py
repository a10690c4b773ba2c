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

from kvmig.cli.client import check_given, path_part
from kvmig.cli.common import (
    Json,
    done,
    patience,
    said,
    show,
    table_of,
    time_of,
    where,
    words_of_flags,
)
from kvmig.cli.files import files_app, pull_files
from kvmig.cli.names import known_model, name_here, typed_source
from kvmig.cli.placement_rates import show_rates
from kvmig.cli.places import why_not_model
from kvmig.cli.rollouts import (
    CanaryOption,
    DeadlineOption,
    HoldOption,
    rollout_app,
    rollout_body,
    rollout_line,
    show_history,
)
from kvmig.core.errors import ConfigError
from kvmig.core.quantities import size_text
from kvmig.placement.file import UnitPlacement
from kvmig.placement.problem import models_of
from kvmig.placement.step_costs import load

model_app = typer.Typer(help="Manage the models of the catalogue.", no_args_is_help=True)
alias_app = typer.Typer(
    help="Manage aliases: names that route to one or more models by weight.", no_args_is_help=True
)
placement_app = typer.Typer(
    help="Manage the placement: which models share which unit.", no_args_is_help=True
)

model_app.add_typer(files_app, name="files")
model_app.add_typer(rollout_app, name="rollout")
model_app.command("pull")(pull_files)
placement_app.command("rates")(show_rates)
model_app.command("why-not")(why_not_model)
model_app.command("history")(show_history)

CHECKING = (
    "the engine checks the flags and the model's configuration; the first check loads the engine's"
    " libraries, which takes 20 s or more"
)

# -- models


def model_row(one: dict[str, Any]) -> Sequence[object]:
    """A row of `kvmig model ls`."""
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
    """Models, and below them what is wrong with some of them."""
    rows = answer.get("data", [answer])
    show(answer, as_json, lambda _: table_of(MODEL_COLUMNS, map(model_row, rows)))
    if not as_json:
        for one in rows:
            why = (one.get("files") or {}).get("why") or one["why"]
            if why:
                print(f"{one['name']}: {why}")


def say_what_waits(answer: Any, as_json: bool) -> None:
    """Name the changed models that run on as they are, by an answer to `apply`."""
    for name in () if as_json else answer["at_next_start"]:
        print(f"{name}: the change takes effect at its next start (kvmig model off, then on)")


def files_line(one: dict[str, Any]) -> str:
    """The files of a model, in a line."""
    if one["why"]:
        return str(one["why"])
    on = "".join(
        f"; on {name}: {it['why'] or 'all'}" for name, it in sorted(one["workers"].items())
    )
    return f"{size_text(one['size'])} of revision {one['revision'][:12]}, in {one['folder']}{on}"


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
        "files": files_line(one["files"]) if one["files"] else "",
        "engine": spec["engine"],
        "flags": shlex.join(spec["flags"]),
        "command": shlex.join(spec.get("command", ())),
        "aliases": ", ".join(spec["aliases"]),
        "adapters": ", ".join(spec["adapters"]),
        "zero after": f"{wanted['zero_after_s']:g} s",
        "unit": spec["unit"],
        "workers": ", ".join(f"{name}={value}" for name, value in spec["worker_selector"].items()),
        "GPUs": ", ".join(f"{gpu['gpu']}: {gpu['bytes']} bytes" for gpu in one["gpus"]),
        "no room": "; ".join(one["no_room"]),
        "revision": f"{one['revision']}{', takes effect at the next start' * one['stale']}",
        "roll-out": rollout_line(one["rollout"]),
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


BASES = {
    "measured": "as an instance used it on this host",
    "gpu_memory": "gpu_memory of the specification",
    "flags": "its flags",
    "estimated": "its files",
    "host": "its files and flags; it runs on the CPU",
}
"""Words for where the sizes come from."""


def fit_view(one: dict[str, Any]) -> str:
    """An evaluation for people."""
    workers = one["workers"]
    each = "" if workers == 1 else f" for each of {workers} workers"
    pairs = {
        "fits": "yes" if one["fits"] else f"no: {one['why']}",
        "weights": f"{one['weights_bytes']} bytes{each} ({one['files_bytes']} in the files)",
        "KV cache": f"{one['kv_bytes']} bytes{each}" if one["kv_bytes"] else "what is left",
        "rest": f"{one['rest_bytes']} bytes{each}, {one['rest_basis']}",
        "from": BASES[one["basis"]],
        "a token": f"{one['token_bytes']} bytes{each}" if one["token_bytes"] else "",
        "a request": f"{one['request_bytes']} bytes{each}, of {one['max_tokens']} tokens"
        if one["request_bytes"]
        else "",
        "host": f"needs {one['host']['need_bytes']} bytes, {one['host']['free_bytes']} are free",
    }
    lines = [f"{name:<11} {value}" for name, value in pairs.items() if value]
    for gpu in one["gpus"]:
        here = " (here)" if gpu["uuid"] in one["place"] else ""
        lines.append(
            f"{gpu['gpu']}: needs {gpu['need_bytes']} bytes, {gpu['free_bytes']} of"
            f" {gpu['total_bytes']} are free{here}"
        )
    lines += [f"it fits with {suggestion_text(one)}" for one in one["suggestions"]]
    return "\n".join([one["name"], *lines])


def suggestion_text(one: dict[str, Any]) -> str:
    """A change after which a model fits, for people."""
    changed = [shlex.join(one["flags"])] if one["flags"] else []
    if one["gpus_per_instance"]:
        changed.append(f"gpus_per_instance: {one['gpus_per_instance']}")
    return (
        f"{' and '.join(changed)}: it then needs {one['need_bytes']} bytes, and takes requests of"
        f" {one['max_tokens']} tokens"
    )


@model_app.command("ls")
@said
def list_models(as_json: Json = False) -> None:
    """List all models."""
    show_rows(where.client().get("models"), as_json)


@said
def list_running(as_json: Json = False) -> None:
    """List the models that run, start, or wait to start."""
    answer = where.client().get("models")
    rows = [one for one in answer["data"] if one["state"] not in ("zero", "failed")]
    show_rows({"data": rows}, as_json)


@model_app.command("search")
@said
def search_models(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Words that names, sources, licences or notes have (default: all)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List models that people run, by names that `kvmig run` and `kvmig pull` take."""
    answer = where.client().get("catalogue", words=" ".join(words or []))
    rows = [
        (
            one["name"], f"{one['parameters']:g} B", f"{one['gb']:g} GB", one["kind"],
            one["licence"] + (", gated" if one["gated"] else ""), one["source"], one["note"],
        )
        for one in answer["data"]
    ]  # fmt: skip
    columns = ("model", "parameters", "weights", "for", "licence", "source", "")
    show(answer, as_json, lambda _: table_of(columns, rows))


@model_app.command("add")
@said
def add_model(
    name: str,
    source: Annotated[
        str,
        typer.Argument(
            help="Folder with the weights, as path:FOLDER, or a source such as"
            " hf:ORG/NAME[@REVISION], whose files are then downloaded. ORG/NAME, where no such"
            " folder is, means hf:ORG/NAME."
        ),
    ],
    engine: Annotated[
        str, typer.Option(help="Engine: vllm, transformers, or toy (computes nothing, for tests).")
    ] = "vllm",
    flags: Annotated[str, typer.Option(help="Flags of the engine, as one quoted string.")] = "",
    least: Annotated[
        int, typer.Option("--min", help="Minimum number of instances; 0: start on demand.")
    ] = 0,
    most: Annotated[int, typer.Option("--max", help="Maximum number of instances.")] = 1,
    target: Annotated[
        float, typer.Option(help="Target load per instance, in the measure of --target-kind.")
    ] = 8.0,
    target_kind: Annotated[
        str,
        typer.Option(
            help="Measure of --target: concurrency, rps (requests per second) or freeness."
        ),
    ] = "concurrency",
    zero_after: Annotated[
        float, typer.Option(help="Seconds without a request before it stops.")
    ] = 300.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds that a start may take.")] = 600.0,
    alias: Annotated[
        list[str] | None,
        typer.Option(help="Another name of the model. May be given several times."),
    ] = None,
    worker_selector: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=VALUE",
            help="Label that the instances' workers must have. May be given several times.",
        ),
    ] = None,
    placement_strategy: Annotated[
        str,
        typer.Option(
            help="Where instances go: spread (the emptiest worker and GPU) or pack (the fullest)"
            " (default: that of `kvmig up --gpu-placement`)."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Add a model to the catalogue. It starts at its first request, or now if --min is not 0."""
    spec = {
        "name": name,
        "source": typed_source(source),
        "engine": engine,
        "flags": words_of_flags(flags),
        "aliases": alias or [],
        "worker_selector": typed_labels(worker_selector or []),
        "placement_strategy": placement_strategy,
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


def typed_labels(typed: Sequence[str]) -> dict[str, str]:
    """Labels as they are typed, LABEL=VALUE. Raises ConfigError."""
    found = {}
    for one in typed:
        name, equals, value = one.partition("=")
        if not equals or name in found:
            wrong = "is there twice" if equals else "must be LABEL=VALUE"
            raise ConfigError(f"--worker-selector is {one!r:.100}, {wrong}")
        found[name] = value
    return found


@model_app.command("evaluate")
@said
def evaluate_model(
    name: str,
    source: Annotated[
        str,
        typer.Argument(
            help="Folder with the weights, as path:FOLDER, or a source such as hf:ORG/NAME"
            " (default: what `kvmig run NAME` would run)."
        ),
    ] = "",
    engine: Annotated[str, typer.Option(help="Engine: vllm, transformers, or toy.")] = "vllm",
    flags: Annotated[str, typer.Option(help="Flags of the engine, as one quoted string.")] = "",
    worker: Annotated[
        str, typer.Option(help="The only worker that it may be on (default: any).")
    ] = "",
    as_json: Json = False,
) -> None:
    """Say in bytes whether and where a model fits, before it starts."""
    client = where.client()
    spec: dict[str, Any] = {"name": check_given(name), "engine": engine, "flags": []}
    if source:
        spec["source"] = typed_source(source)
    else:
        known = known_model(client, name)
        spec |= {"name": known.name, "source": known.source, "flags": shlex.split(known.flags)}
        spec = known.shown["spec"] if known.shown else spec
    spec["flags"] += words_of_flags(flags)
    with patience(CHECKING):
        where_to = f"?worker={quote(worker)}" if worker else ""
        answer = client.post(f"evaluate{where_to}", spec)
    show(answer, as_json, fit_view)


@model_app.command("set")
@said
def set_model(
    name: str,
    flags: Annotated[
        str | None, typer.Option(help="Flags of the engine, as one quoted string.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Folder with the weights as path:FOLDER, or hf:ORG/NAME.")
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(help="Folder of another vLLM for its instances; empty: the installed one."),
    ] = None,
    zero_after: Annotated[
        float | None, typer.Option(help="Seconds without a request before it stops.")
    ] = None,
    canary: CanaryOption = "",
    hold: HoldOption = 60.0,
    deadline: DeadlineOption = None,
    as_json: Json = False,
) -> None:
    """Change a model. New flags and a new source roll out while it serves."""
    client = where.client()
    before = client.get(f"models/{path_part(name)}")
    spec = before["spec"]
    if flags is not None:
        spec["flags"] = words_of_flags(flags)
    if source is not None:
        spec["source"] = typed_source(source)
    if vllm is not None:
        spec["vllm"] = vllm and str(Path(vllm).absolute())
    if zero_after is not None:
        spec["instances"]["zero_after_s"] = zero_after
    with patience(CHECKING):
        body = {
            "fleet": {"models": [spec]},
            "rollout": rollout_body(canary, hold, deadline),
            "based_on": {before["name"]: before["revision"]},  # else it undoes what comes meanwhile
        }
        answer = client.post("apply", body)
    show_rows(client.get(f"models/{path_part(name)}"), as_json)
    say_what_waits(answer, as_json)


@model_app.command("show")
@said
def show_model(name: str, as_json: Json = False) -> None:
    """Show the specification, state and recent decisions of a model; with --json, its revisions."""
    show(where.client().get(f"models/{path_part(name)}"), as_json, model_view)


@model_app.command("scale")
@said
def scale_model(
    name: str,
    least: Annotated[int, typer.Option("--min", help="Minimum number of instances.")],
    most: Annotated[int, typer.Option("--max", help="Maximum number of instances.")],
    as_json: Json = False,
) -> None:
    """Set the minimum and maximum number of instances of a model."""
    answer = where.client().post(f"models/{path_part(name)}/scale", {"min": least, "max": most})
    show_rows(answer, as_json)


@model_app.command("on")
@said
def switch_on(name: str, as_json: Json = False) -> None:
    """Enable a model."""
    done(where.client().post(f"models/{path_part(name)}/switch", {"on": True}), as_json)


@model_app.command("off")
@said
def switch_off(name: str, as_json: Json = False) -> None:
    """Disable a model: it refuses new requests, finishes running ones, stays in the catalogue."""
    done(where.client().post(f"models/{path_part(name)}/switch", {"on": False}), as_json)


@model_app.command("wake")
@said
def wake_model(name: str, as_json: Json = False) -> None:
    """Start a model now, even after a failed start."""
    done(where.client().post(f"models/{path_part(name)}/wake"), as_json)


@model_app.command("rm")
@said
def remove_model(name: str, as_json: Json = False) -> None:
    """Remove a model from the catalogue, after its running requests have finished."""
    client = where.client()
    done(client.delete(f"models/{path_part(name_here(client, name))}"), as_json)


@model_app.command("logs")
@said
def logs_of_model(
    name: str,
    lines: Annotated[
        int, typer.Option("-n", help="Number of lines, counted from the end of the log.")
    ] = 50,
    as_json: Json = False,
) -> None:
    """Print the log of a model's processes."""
    answer = where.client().get(f"models/{path_part(name)}/logs", lines=lines)
    show(answer, as_json, lambda found: "\n".join(found["data"]))


# -- aliases


@alias_app.command("set")
@said
def set_alias(
    name: str,
    models: Annotated[
        list[str], typer.Argument(help="One or more models, each as MODEL or MODEL=WEIGHT.")
    ],
    as_json: Json = False,
) -> None:
    """Create or replace an alias."""
    targets = {}
    for model in models:
        target, _, weight = model.partition("=")
        if not (weight or "1").isdecimal():
            raise ConfigError(f"the weight of {target} is {weight!r}, must be a whole number")
        targets[target] = int(weight or 1)
    done(where.client().put(f"aliases/{path_part(name)}", {"targets": targets}), as_json)


@alias_app.command("ls")
@said
def list_aliases(as_json: Json = False) -> None:
    """List all aliases."""
    answer = where.client().get("aliases")
    rows = [
        (name, ", ".join(f"{model}={weight}" for model, weight in targets.items()))
        for name, targets in answer["data"].items()
    ]
    show(answer, as_json, lambda _: table_of(["alias", "models"], rows))


@alias_app.command("rm")
@said
def remove_alias(name: str, as_json: Json = False) -> None:
    """Remove an alias."""
    done(where.client().delete(f"aliases/{path_part(name)}"), as_json)


# -- the placement


@placement_app.command("set")
@said
def set_placement(
    file: Annotated[
        Path,
        typer.Argument(help="Placement file, as written by `python -m kvmig.placement --out`."),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan.")] = False,
    models: Annotated[
        Path | None,
        typer.Option(
            help="File of the models that it was planned for: it is planned again when requests"
            " come at other rates. Needs --costs."
        ),
    ] = None,
    costs: Annotated[
        str, typer.Option(help="Device that it was planned for: a name or a .toml file.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Move the running models to a placement while they serve, and print the plan."""
    body: dict[str, Any] = {"placement": tomllib.loads(_read(file)), "dry_run": dry_run}
    if (models is None) != (not costs):
        raise ConfigError("--models and --costs must both be given, or neither")
    if models is not None:
        loads = models_of(_read(models), f"--models {models}")
        body["replan"] = msgspec.to_builtins({"device": load(costs), "models": loads})
    answer = where.client().put("placement", body)
    show(answer, as_json, lambda found: "\n".join(found["plan"]))


def _read(file: Path) -> str:
    """A TOML file's text. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
        tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    return text


@placement_app.command("show")
@said
def show_placement(as_json: Json = False) -> None:
    """Show the desired placement, whether it is reached, and the steps taken so far."""
    found = where.client().get("placement")
    wanted = msgspec.convert(found["placement"] or {"units": []}, UnitPlacement)
    rows = [(one.called, ", ".join(each.name for each in one.models)) for one in wanted.units]
    show(found, as_json, lambda _: table_of(["unit", "models"], rows))
    if not as_json:
        state = " ".join(filter(None, (found["state"], found["why"])))
        rates = [
            f"{name}: {rate:.2f} requests per second, planned for {found['planned'][name]:.2f}"
            for name, rate in sorted(found["rates"].items())
        ]
        print("\n".join([*found["lines"], *rates, *filter(None, [found["replan"]]), state]))


@placement_app.command("rm")
@said
def remove_placement(as_json: Json = False) -> None:
    """Remove the desired placement: each model's own limits decide its number of instances."""
    done(where.client().delete("placement"), as_json)
