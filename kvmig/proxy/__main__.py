"""`python -m kvmig.proxy [FOLDER] ANNOUNCED LISTENING HEARTBEAT`: one proxy, for init only."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from kvmig.core.errors import KvmigError, StartupError
from kvmig.process.child import Announcement, announce, leave, quiet, read_launch, say
from kvmig.proxy.messages import ProxyLaunch
from kvmig.proxy.process import run


def main(words: Sequence[str]) -> int:
    """Launch document on stdin. words: descriptors, of where it announces that it is ready, of the
    port's socket, and for `kvmig.process.child.send_heartbeats`.
    """
    descriptors = words[-3:]
    if not 3 <= len(words) <= 4 or not all(map(str.isdecimal, descriptors)):
        print(
            "usage: python -m kvmig.proxy [FOLDER] ANNOUNCED LISTENING HEARTBEAT", file=sys.stderr
        )
        return 2
    announced, listening, heartbeat = map(int, descriptors)
    try:
        launch = read_launch(ProxyLaunch)
        quiet(launch.name)
        uvloop.run(run(launch, announced, listening, heartbeat))
    except KvmigError as error:
        try:
            announce(announced, Announcement(failed=str(error)))
        except StartupError:  # announced before: it ran, then failed
            say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
