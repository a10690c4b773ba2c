"""`kvmig mirror`: a mirror of the hub, with or without a fleet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvmig.cli.common import said, where
from kvmig.core.quantities import bytes_of
from kvmig.core.secret import SECRET
from kvmig.fleet.settings import data_folder


@said
def mirror_hub(
    host: Annotated[
        str,
        typer.Option(
            help=f"Address to listen on; one that other hosts reach needs {SECRET} in the"
            " environment."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8090,
    folder: Annotated[
        str, typer.Option(help="Folder of the files (default: mirror in the data folder).")
    ] = "",
    disk: Annotated[
        str,
        typer.Option(
            help="Disk space for files, in bytes or as 500GB (default: no limit). Files that were"
            " not asked for for the longest time go first."
        ),
    ] = "",
    hub: Annotated[
        str,
        typer.Option(help="URL of the hub (default: HF_ENDPOINT, or https://huggingface.co)."),
    ] = "",
    pin: Annotated[
        list[str] | None,
        typer.Option(help="Repository, as ORG/NAME, whose files stay. May be given several times."),
    ] = None,
    prefetch: Annotated[
        list[str] | None,
        typer.Option(
            help="Model, as ORG/NAME, whose files are downloaded before the first call, and stay."
            " May be given several times."
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of another mirror of the cluster, which has the same"
            f" {SECRET}. May be given several times."
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(help="URL under which the other mirrors reach this one.")
    ] = "",
) -> None:
    """Serve the hub's protocol, and download each file once. Clients set HF_ENDPOINT to the URL
    that is printed."""
    from kvmig.mirror.process import run_mirror
    from kvmig.mirror.settings import MirrorSettings, check_settings

    settings = MirrorSettings(
        folder=str(Path(folder or Path(data_folder(where.data), "mirror")).absolute()),
        host=host,
        port=port,
        hub=hub,
        most_bytes=bytes_of("--disk", disk),
        pins=tuple(pin or ()),
        prefetch=tuple(prefetch or ()),
        url=url,
        peers=tuple(peer or ()),
        secret=os.environ.pop(SECRET, ""),
    )
    run_mirror(check_settings(settings))
