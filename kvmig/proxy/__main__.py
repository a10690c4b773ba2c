"""`python -m kvmig.proxy [FOLDER] ANNOUNCED LISTENING HEARTBEAT [PEERS]`: one proxy, for the
supervisor only."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from kvmig.process.child import leave, quiet
from kvmig.process.child_main import run_child
from kvmig.proxy.messages import ProxyLaunch
from kvmig.proxy.process import run


def main(words: Sequence[str]) -> int:
    """Launch document on stdin. words: descriptors, of where it announces that it is ready, of the
    port's socket, for `kvmig.process.child.send_heartbeats`, and perhaps of the socket for hosts
    that stand by.
    """
    form = "kvmig.proxy [FOLDER] ANNOUNCED LISTENING HEARTBEAT [PEERS]"
    return run_child(words, form, ProxyLaunch, _run, counts=(4, 3))


def _run(launch: ProxyLaunch, *descriptors: int) -> None:
    quiet(launch.name)
    uvloop.run(run(launch, *descriptors))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
