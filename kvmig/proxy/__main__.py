"""`python -m kvmig.proxy DESCRIPTOR`: one proxy, for the fleet's init only."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from kvmig.cli.processes import Announcement, leave, quiet, say
from kvmig.controlplane.child import announce, read_launch
from kvmig.ground.errors import KvmigError, StartupError
from kvmig.proxy.messages import ProxyLaunch
from kvmig.proxy.process import run


def main(argv: Sequence[str]) -> int:
    """Launch document on stdin, readiness on the file descriptor named by argv[1]."""
    if len(argv) != 2 or not argv[1].isdecimal():
        print("usage: python -m kvmig.proxy DESCRIPTOR", file=sys.stderr)
        return 2
    descriptor = int(argv[1])
    try:
        launch = read_launch(ProxyLaunch)
        quiet(launch.name)
        uvloop.run(run(launch, descriptor))
    except KvmigError as error:
        try:
            announce(descriptor, Announcement(failed=str(error)))
        except StartupError:  # announced before: it ran, then failed
            say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv))
