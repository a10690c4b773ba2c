"""`kvmig model pull` and `kvmig model files`: models' files, and how far their downloads are."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvmig.cli.client import CallFailure, FleetClient
from kvmig.cli.common import Json, done, said, show, show_table, table_of, time_of, where
from kvmig.cli.names import source_of
from kvmig.core.quantities import size_text

files_app = typer.Typer(
    help="Manage the files of models that were downloaded.", no_args_is_help=True
)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
LOOK_S = 0.5
LINE_S = 5.0
"""Pause between two lines of progress where no terminal shows a bar."""
SOURCE_HELP = (
    "Where the files are: hf:ORG/NAME[@REVISION], modelscope:ORG/NAME, s3://BUCKET/FOLDER/ or"
    " https://HOST/FOLDER/."
)
FILES_COLUMNS = ("source", "state", "size", "revision", "models", "pinned", "last used")


def files_row(one: dict[str, Any]) -> Sequence[object]:
    """A row of `kvmig model files ls`."""
    size = size_text(one["size"]) if one["size"] else None
    if one["state"] == "downloading":
        size = f"{size_text(one['done'])} of {size}"
    return (
        one["source"],
        one["state"],
        size,
        one["revision"][:12] or None,
        ", ".join(one["models"]) or None,
        "yes" if one["pinned"] else None,
        time_of(one["last_used"]),
    )


def follow_download(client: FleetClient, source: str, quiet: bool = False) -> dict[str, Any]:
    """Show how far a download is, until its files are whole. Ctrl-C ends the command, and not the
    download. Raises CallFailure where they can't be fetched. quiet: show nothing."""
    try:
        return _follow(client, source, quiet)
    except KeyboardInterrupt as interrupted:
        print("kvmig: the fleet goes on with the download", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from interrupted


def _follow(client: FleetClient, source: str, quiet: bool) -> dict[str, Any]:
    def look() -> dict[str, Any]:
        found: dict[str, Any] = client.get("files", source=source)["data"][0]
        if found["state"] == "failed":
            raise CallFailure(f"{source}: {found['why']}")
        return found

    if quiet or not sys.stderr.isatty():
        return _follow_in_lines(source, look, quiet)
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(source, total=None)
        while (found := look())["state"] != "whole":
            progress.update(task, total=found["size"] or None, completed=found["done"])
            time.sleep(LOOK_S)
    return found


def _follow_in_lines(source: str, look: Any, quiet: bool) -> dict[str, Any]:
    said_at, before = time.monotonic(), ""
    while (found := look())["state"] != "whole":
        late = time.monotonic() - said_at >= LINE_S
        if not quiet and found["why"] != before and (late or not before):
            said_at, before = time.monotonic(), found["why"]
            print(f"kvmig: {source}: {before}", file=sys.stderr, flush=True)
        time.sleep(LOOK_S)
    return dict(found)


@said
def pull_files(
    source: Annotated[
        str,
        typer.Argument(
            help=f"{SOURCE_HELP} Or a model of the fleet, a name that `kvmig model search` lists,"
            " or ORG/NAME of the Hugging Face Hub."
        ),
    ],
    wait: Annotated[
        bool, typer.Option(help="Wait until the files are whole; the fleet goes on either way.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Download a model's files, or their newest revision. Nothing starts."""
    client = where.client()
    found = client.post("files", {"source": source_of(client, source)})
    if wait:
        found = follow_download(client, found["source"], quiet=as_json)
    show(found, as_json, lambda one: table_of(FILES_COLUMNS, [files_row(one)]))


@files_app.command("ls")
@said
def list_files(as_json: Json = False) -> None:
    """List the files of models: size, revision, the models that use them."""
    answer = where.client().get("files")
    show_table(answer, as_json, FILES_COLUMNS, files_row)
    if not as_json:
        for one in answer["data"]:
            if one["why"]:
                print(f"{one['source']}: {one['why']}")
            for name, copy in sorted(one["workers"].items()):
                if copy["why"]:
                    print(f"{one['source']} on worker {name}: {copy['why']}")


@files_app.command("pin")
@said
def pin_files(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)], as_json: Json = False
) -> None:
    """Keep files in spite of `kvmig up --model-files`."""
    set_pinned(source, True, as_json)


@files_app.command("unpin")
@said
def unpin_files(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)], as_json: Json = False
) -> None:
    """Let files go again when room is needed."""
    set_pinned(source, False, as_json)


def set_pinned(source: str, pinned: bool, as_json: bool) -> None:
    """Keep the files of a source, or no more."""
    client = where.client()
    body = {"source": source_of(client, source), "pinned": pinned}
    done(client.post("files/pin", body), as_json)


@files_app.command("rm")
@said
def remove_files(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)], as_json: Json = False
) -> None:
    """Remove files that no model uses; a download of them ends."""
    client = where.client()
    done(client.delete("files", source=source_of(client, source)), as_json)
