"""`kvmig worker`: the hosts that models run on, and orders about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any

import typer

from kvmig.cli.client import CallFailure, path_part
from kvmig.cli.common import Json, said, show, table_of, time_of, where
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.errors import ConfigError
from kvmig.core.quantities import size_text

worker_app = typer.Typer(
    help="Manage workers: the hosts that models run on (`kvmig up --ray`).", no_args_is_help=True
)

WorkerName = Annotated[str, typer.Argument(help="Name of the worker, as `kvmig worker ls` has it.")]
LOOK_S = 1.0
"""Pause between two looks at a drain."""
COLUMNS = ("worker", "state", "instances", "memory free", "GPUs", "address", "labels")


def standing(one: dict[str, Any]) -> str:
    """A worker's state and what was ordered, in a few words."""
    if one["drain"] is not None:
        drain = f"{one['drain']['state']}, {one['state']}"
        return drain if one["state"] != "ready" else str(one["drain"]["state"])
    return f"{one['state']}, cordoned" if one["cordoned"] else str(one["state"])


def worker_row(one: dict[str, Any]) -> Sequence[object]:
    """A row of `kvmig worker ls`."""
    known = bool(one["memory_bytes"])
    free, total = size_text(one["memory_free_bytes"]), size_text(one["memory_bytes"])
    return (
        one["name"],
        standing(one),
        len(one["instances"]),
        f"{free} of {total}" if known else None,
        len(one["gpus"]) or None,
        one["address"] or None,
        labels_text(one["labels"]) or None,
    )


def labels_text(labels: dict[str, str]) -> str:
    """Labels as they are given."""
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def forecast_text(left: dict[str, Any]) -> str:
    """What a drain has still to move."""
    if not left["streams"]:
        return "no stream is left"
    size = f"{left['streams']} streams, {size_text(left['kv_bytes'])}"
    if left["seconds"] is None:
        return f"{size}; how fast they move is not known yet"
    return f"{size}, about {left['seconds']:.1f} s"


def drain_text(drain: dict[str, Any] | None) -> str:
    """A drain in a line."""
    if drain is None:
        return ""
    until = "" if drain["deadline"] is None else f", until {time_of(drain['deadline'])}"
    begun = f"{drain['state']}, since {time_of(drain['since'])}{until}"
    return begun if drain["state"] == "drained" else f"{begun}: {forecast_text(drain['left'])}"


def worker_view(one: dict[str, Any]) -> str:
    """One worker for people."""
    total, free = size_text(one["memory_bytes"]), size_text(one["memory_free_bytes"])
    pairs = {
        "state": standing(one),
        "why": one["why"],
        "address": one["address"],
        "host": one["host"],
        "node": one["node"],
        "labels": labels_text(one["labels"]),
        "memory": f"{free} of {total} free" if one["memory_bytes"] else "",
        "GPUs": "; ".join(
            f"{gpu['gpu']}: {size_text(gpu['free_bytes'])} of {size_text(gpu['total_bytes'])} free"
            for gpu in one["gpus"]
        ),
        "engines": ", ".join(one["engines"]),
        "forks": "; ".join(f"{name}: {state}" for name, state in one["fork_servers"].items()),
        "files": files_text(one["files"]),
        "drain": drain_text(one["drain"]),
    }
    lines = [f"{name:<9} {value}" for name, value in pairs.items() if value]
    lines += map(folder_text, one["files"]["models"])
    for each in one["instances"]:
        stays = f": {each['stays']}" if each["stays"] else ""
        lines.append(
            f"  {each['model']} {each['instance']}  {each['state']},"
            f" {each['streams']} streams{stays}"
        )
    return "\n".join([one["name"], *lines])


def files_text(files: dict[str, Any]) -> str:
    """The files of models on a worker's disk, all together."""
    if files["why"]:
        return str(files["why"])
    if not files["folder"]:
        return ""
    done = sum(each["done"] for each in files["models"])
    shared = ", the folder of the fleet's server" if files["shared"] else ""
    free = size_text(files["free_bytes"])
    return f"{size_text(done)} in {files['folder']}{shared}; {free} of the disk are free"


def folder_text(one: dict[str, Any]) -> str:
    """A model's files on a worker."""
    name = one["source"] or one["folder"].rpartition("/")[2]
    took = "" if one["took_s"] is None else f", downloaded in {one['took_s']:.1f} s"
    return f"  {name}  {one['why'] or size_text(one['size']) + took}"


def path_of(name: str, order: str = "") -> str:
    """The path of a worker in the API."""
    return f"workers/{path_part(name, safe='')}{f'/{order}' if order else ''}"


@worker_app.command("ls")
@said
def list_workers(as_json: Json = False) -> None:
    """List all workers."""
    answer = where.client().get("workers")
    show(answer, as_json, lambda found: table_of(COLUMNS, map(worker_row, found["data"])))


@worker_app.command("show")
@said
def show_worker(name: WorkerName, as_json: Json = False) -> None:
    """Show a worker: its memory, its GPUs, its instances, and how far its drain is."""
    show(where.client().get(path_of(name)), as_json, worker_view)


@worker_app.command("label")
@said
def label_worker(
    name: WorkerName,
    labels: Annotated[list[str], typer.Argument(help="NAME=VALUE sets a label, NAME- removes it.")],
    as_json: Json = False,
) -> None:
    """Set or remove labels of a worker."""
    body = {"labels": dict(map(label_of, labels))}
    show(where.client().post(path_of(name, "labels"), body), as_json, worker_view)


def label_of(text: str) -> tuple[str, str | None]:
    """A label's name and value; None: it is removed. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if equals and name:
        return name, value
    if text.endswith("-") and len(text) > 1:
        return text[:-1], None
    raise ConfigError(f"the label is {text!r:.100}, must be NAME=VALUE, or NAME- to remove it")


@worker_app.command("cordon")
@said
def cordon_worker(name: WorkerName, as_json: Json = False) -> None:
    """Start no new instances on a worker; those that run there stay."""
    show(where.client().post(path_of(name, "cordon")), as_json, worker_view)


@worker_app.command("uncordon")
@said
def uncordon_worker(name: WorkerName, as_json: Json = False) -> None:
    """Let instances start on a worker again; this also ends its drain."""
    show(where.client().post(path_of(name, "uncordon")), as_json, worker_view)


@worker_app.command("drain")
@said
def drain_worker(
    name: WorkerName,
    deadline: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which streams that have not moved are computed again elsewhere"
            " (default: 300 for each instance)."
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds to wait until nothing is left there; exit code 1 if something still is.",
        ),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Move all instances of a worker to others: new ones start first, then streams move live.

    `kvmig worker show` prints the progress.
    """
    client = where.client()
    answer = client.post(path_of(name, "drain"), {"deadline_s": deadline})
    if wait:
        answer = wait_until_drained(lambda: client.get(path_of(name)), wait)
    show(answer, as_json, worker_view)


def wait_until_drained(
    look: Callable[[], Any],
    wait_s: float,
    clock: TimeSource = monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Look at a worker until it is drained, also while the fleet's server starts again: the drain
    goes on then. Raises CallFailure where it isn't by then."""
    deadline = clock() + wait_s
    while True:
        try:
            one = look()
        except CallFailure as error:
            if is_refusal(error) or clock() >= deadline:
                raise
        else:
            if one["drain"] is None:
                raise CallFailure(f"the drain of {one['name']} was undone")
            if one["drain"]["state"] == "drained":
                return one
            if clock() >= deadline:
                left = forecast_text(one["drain"]["left"])
                raise CallFailure(f"{one['name']} is not drained after {wait_s:g} s: {left}")
        sleep(LOOK_S)


def is_refusal(error: CallFailure) -> bool:
    """Whether the server has refused; else it, or its proxy, is away for now."""
    return error.status is not None and error.status < HTTPStatus.INTERNAL_SERVER_ERROR
