"""`python -m kvmig.launcher.ray_watch ADDRESS [--check]`: watches a Ray cluster for a fleet.

Ray ends a process that has joined a cluster when the cluster's head is gone. So this is a process
of its own, which a fleet's server starts again, and not the server. It writes a report to stdout
every LOOK_S, reads from stdin, a line each, which files nodes are to have, and ends with its stdin.
With --check it says only whether the cluster can be joined.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence

from kvmig.core.errors import ConfigError
from kvmig.launcher import ray_cluster
from kvmig.launcher.node_files import wish_of
from kvmig.launcher.node_reports import ClusterReport, encode_report
from kvmig.launcher.ray_agents import NodeAgents
from kvmig.process.child import leave, quiet, say

LOOK_S = 1.0
"""Pause between two reports."""
FORM = "kvmig.launcher.ray_watch ADDRESS [--check]"

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> int:
    """The exit status: 2 for a cluster that can't be joined."""
    if not words or words[1:] not in ([], ["--check"]):
        print(f"usage: python -m {FORM}", file=sys.stderr)
        return 2
    quiet("workers")
    reports = os.dup(1)
    os.dup2(2, 1)  # Ray prints, too
    checks = words[1:] == ["--check"]
    try:
        ray_cluster.connect(words[0], checked=not checks)
    except ConfigError as error:
        if checks:
            say(str(error))
        else:
            os.write(reports, encode_report(ClusterReport(failed=str(error))))
        return 2
    if checks:
        ray_cluster.disconnect()
        return 0
    agents = NodeAgents()
    threading.Thread(target=watch, args=(agents, reports), name="reports", daemon=True).start()
    for line in sys.stdin.buffer:
        agents.take_wish(wish_of(line))
    return 0  # Ray ends the agents with this process


def watch(agents: NodeAgents, reports: int) -> None:
    """Write reports; ends the process when no process reads them, or Ray has none."""
    try:
        with os.fdopen(reports, "wb", buffering=0) as out:
            while True:
                out.write(encode_report(agents.look_at_nodes()))
                time.sleep(LOOK_S)
    except Exception:
        log.exception("the Ray cluster can't be watched any more")
    finally:
        leave(1)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
