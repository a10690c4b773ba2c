"""`python -m kvmig.launcher.llumlet_main [TITLE] DESCRIPTOR`: one instance, for the launcher
only."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from functools import partial

import msgspec
import uvloop

from kvmig.controlplane.llumlet import Llumlet
from kvmig.core.background import keep_running
from kvmig.core.errors import StartupError
from kvmig.core.heap import keep_small
from kvmig.core.start_times import EngineTimes, StartTimes
from kvmig.engines.registry import kind_of
from kvmig.launcher.launch import LlumletLaunch
from kvmig.process.child import (
    StartAnnouncement,
    announce,
    begin_loading,
    end_collecting,
    end_loading,
    leave,
    quiet,
    say,
    until_stopped,
)
from kvmig.process.child_main import announce_failure, run_child
from kvmig.process.hung_process import print_stacks_when_asked

STOP_S = 3.0
SWITCH_INTERVAL_S = 0.0005
"""The event loop gets the interpreter from the engine's thread this soon (Python's default:
5 ms, several decode steps of a small model)."""


async def run(launch: LlumletLaunch, descriptor: int, began: float) -> None:
    """Serve until SIGTERM or the launcher's end. began: the process, by the steady clock."""
    print_stacks_when_asked()
    kind = kind_of(launch.config.engine)
    if launch.engine_tree:  # on this very machine, or the installed one would run
        kind.check_tree(launch.engine_tree)
    kind.prepare()
    kind.load()
    end_loading()
    loaded = time.monotonic()
    unit_tokens, unit = launch.config.migration.unit_tokens, launch.config.unit
    engine = kind.make(launch.engine_argv, unit_tokens, unit)
    made, parts = time.monotonic(), kind.times(engine)
    if parts == EngineTimes():
        parts = EngineTimes(weights_s=made - loaded)
    name = launch.config.public_name(launch.instance)
    llumlet = Llumlet(name, launch.cluster, launch.secret, launch.config, engine)
    llumlet.likeness = kind.likeness(engine)
    stopped = asyncio.ensure_future(until_stopped())
    try:
        await llumlet.start()
        now = time.monotonic()
        llumlet.times = StartTimes(
            **msgspec.structs.asdict(parts),
            imports_s=loaded - began,
            warm_up_s=now - made,
            total_s=now - began,
        )
        say(f"its start took {llumlet.times.words()}", f"kvmig {launch.instance}")
        gc.collect()
        gc.freeze()  # a collection that walks all of vLLM would stop it for tens of ms
        if engine.unmovable:
            say(f"its requests can't be moved: {engine.unmovable}", f"kvmig {launch.instance}")
        if unit is not None and isinstance(engine.sharing, str):
            say(f"its KV cache is its own alone: {engine.sharing}", f"kvmig {launch.instance}")
        elif not isinstance(engine.sharing, str) and (why := engine.sharing.unlimited):
            words = f"--unit-shares order its steps, and limit no SMs: {why}"
            say(words, f"kvmig {launch.instance}")
        announce(
            descriptor,
            StartAnnouncement(endpoint=llumlet.endpoint, kv_bytes=kind.kv_bytes(engine)),
        )
        trimming = asyncio.create_task(keep_running(keep_small, "heap"), name="heap")
        failed = asyncio.ensure_future(llumlet.failed())
        await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            if isinstance(error := failed.result(), MemoryError):
                say(f"out of memory: {error}", f"kvmig {launch.instance}")
                leave(1)  # at once: what it would still say or do can't be relied on
            raise StartupError(f"the engine failed: {error}")
        failed.cancel()
        trimming.cancel()
    finally:
        stopped.cancel()
        end_collecting()
        await llumlet.close(STOP_S)


def main(words: Sequence[str]) -> int:
    """Launch document on stdin, the announcement on the file descriptor that is the last word."""
    form = "kvmig.launcher.llumlet_main [TITLE] DESCRIPTOR"
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    begin_loading()
    report = partial(announce_failure, said_if_unread=False)
    run = partial(_run, time.monotonic())
    return run_child(words, form, LlumletLaunch, run, report=report)


def _run(began: float, launch: LlumletLaunch, announced: int) -> None:
    quiet(launch.instance)
    uvloop.run(run(launch, announced, began))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
