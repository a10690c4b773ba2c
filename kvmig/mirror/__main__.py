"""`python -m kvmig.mirror [FOLDER] ANNOUNCED LISTENING HEARTBEAT`: a fleet's mirror, for its
supervisor only; `kvmig mirror` is for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from kvmig.mirror.process import run_child_mirror
from kvmig.mirror.settings import MirrorSettings
from kvmig.process.child import leave, quiet
from kvmig.process.child_main import run_child


def main(words: Sequence[str]) -> int:
    """Launch document on stdin. words: descriptors, of where it announces that it is ready, of the
    port's socket, and for `kvmig.process.child.send_heartbeats`.
    """
    form = "kvmig.mirror [FOLDER] ANNOUNCED LISTENING HEARTBEAT"
    return run_child(words, form, MirrorSettings, _run, counts=(3,))


def _run(settings: MirrorSettings, *descriptors: int) -> None:
    quiet("mirror")
    uvloop.run(run_child_mirror(settings, *descriptors))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
