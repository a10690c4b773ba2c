"""`python -m kvmig.cli.scheduler DESCRIPTOR`: the scheduler process, for the launcher only."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from kvmig.cli.process import say
from kvmig.controlplane.child import read_launch
from kvmig.controlplane.scheduler_process import SchedulerLaunch, serve
from kvmig.ground.errors import KvmigError


def main(argv: Sequence[str]) -> int:
    """Launch document on stdin, readiness on the file descriptor named by argv[1]."""
    logging.basicConfig(format="%(asctime)s scheduler %(levelname)s %(message)s")
    if len(argv) != 2 or not argv[1].isdecimal():
        print("usage: python -m kvmig.cli.scheduler DESCRIPTOR", file=sys.stderr)
        return 2
    try:
        asyncio.run(serve(read_launch(SchedulerLaunch), int(argv[1])))
    except KvmigError as error:
        say(str(error), "kvmig scheduler")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
