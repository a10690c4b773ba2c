"""`python -m kvmig.fleet.fork_server DESCRIPTOR`: what a fleet's server and proxies are forked
from.

It has their libraries loaded, so that one that dies is back without loading them again, and so that
all of them share that memory. For the fleet's supervisor only, by `kvmig.process.fork_server`.
"""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Sequence
from functools import partial

from kvmig.fleet.supervisor import PROXY, SERVER, SMALL
from kvmig.process.child import leave, say
from kvmig.process.fork_server import ForkServerLoaded, send_news, serve
from kvmig.process.forkable import make_forkable

USED = (
    SERVER, PROXY, *SMALL.values(), "sqlalchemy.dialects.sqlite.pysqlite",
    "uvicorn.protocols.http.httptools_impl",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Load, then fork as often as the supervisor wants, until it is gone."""
    if why := make_forkable(*(partial(importlib.import_module, one) for one in USED)):
        say(f"the server and the proxies start without a fork server: {why}")
        return 1
    init = socket.socket(fileno=int(argv[1]))
    send_news(init, ForkServerLoaded({}))
    return serve([init])


if __name__ == "__main__":
    leave(main(sys.argv))
