"""`kvmig doctor`: checks this machine before a fleet starts."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import msgspec
import typer

from kvmig.cli.common import said, where
from kvmig.cli.machine_verdicts import exit_status, verdicts
from kvmig.fleet.settings import data_folder

DATABASE = "KVMIG_DATABASE"
"""Environment variable: the URL of `kvmig up --database`."""


@said
def doctor(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")] = 8080,
    database: Annotated[
        str, typer.Option(help="URL of the fleet's database (environment: KVMIG_DATABASE).")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: one line for each finding, with what to do.

    Exit code 1 if a fleet can't serve here, 0 otherwise. While the fleet of this --data serves, a
    taken port is a warning.
    """
    from kvmig.cli.machine_facts import measure

    url = database or os.environ.get(DATABASE, "")
    found = verdicts(measure((host, port), data_folder(where.data), url))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        width = max(len(one.name) for one in found)
        for one in found:
            print(f"{one.level:<4} {one.name:<{width}} {one.said}")
    raise typer.Exit(exit_status(found))
