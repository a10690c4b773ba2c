"""`kvmig login`: a key for the person who logs in at the fleet's identity provider."""

from __future__ import annotations

from typing import Annotated

import typer

from kvmig.cli.common import Json, said, show, where


@said
def log_in(
    browser: Annotated[
        bool,
        typer.Option(
            "--browser", help="Log in with a browser on this host, not with a code on any device."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Log in at the fleet's identity provider and print an API key."""
    from kvmig.cli.login_flows import id_token  # no other command needs its libraries

    fleet = where.client()
    told = fleet.get("login")
    token = id_token(told["issuer"], told["client_id"], browser=browser)
    show(fleet.post("login", {"id_token": token}), as_json, lambda found: str(found["key"]))
