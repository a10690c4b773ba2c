"""The command `kvmig top`."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from kvmig.cli.common import Json, said, show, where
from kvmig.cli.top.sources import LiveSource, open_source
from kvmig.core.errors import ConfigError
from kvmig.core.live_records import LiveFleet


@said
def show_top(as_json: Json = False) -> None:
    """Show what runs, live: models, instances, streams, migrations, GPUs. Drain and move by key.

    With --url also of one `kvmig.serve` and its admin key. With --json print what runs now, once.
    """
    if not as_json and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`kvmig top` needs a terminal; with --json it prints what runs now")
    source = open_source(where.client())
    if as_json:
        found = asyncio.run(observed_once(source))
        show(msgspec.to_builtins(found), as_json, lambda _: "")
        return
    # Its library takes a quarter of a second to load, which other commands needn't.
    from kvmig.cli.top.app import TopApp

    TopApp(source).run()


async def observed_once(source: LiveSource) -> LiveFleet:
    """One look. Raises CallFailure."""
    try:
        return await source.observe()
    finally:
        await source.close()
