"""Processes that get secrets as words: `ps` shows none of them to other users."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil

from kvmig.command.server_process import ServerProcess
from kvmig.fleet.supervisor import by_itself
from kvmig.process.hidden_words import TRUE_WORDS, start_of
from tests.support.waiting import until

SECRET = "hf_aVeryLongTokenOfSomebody"
WORDS = ("3", "--hf-token", SECRET, f"--api-key={SECRET}", f"http://me:{SECRET}@host/", "--port=1")
PATIENCE_S = 30.0


async def started(*words: str) -> tuple[list[str], dict[str, Any]]:
    """What `ps` shows of a process that runs, and what it says of itself."""
    said, stdout = os.pipe()
    stdin, told = os.pipe()
    try:
        process = await by_itself(
            "tests.support.forked", words, dict(os.environ), (stdin, stdout, 2), stdin
        )
        os.close(stdout)
        with os.fdopen(said) as lines:
            found = json.loads(
                await asyncio.wait_for(asyncio.to_thread(lines.readline), PATIENCE_S)
            )
            shown = psutil.Process(process.pid).cmdline()
    finally:
        os.close(told)
        os.close(stdin)
    assert await process.wait() == 3
    return shown, found


async def test_ps_shows_no_secret_of_a_process_that_gets_it_as_a_word() -> None:
    shown, found = await started(*WORDS)

    assert SECRET not in " ".join(shown)
    assert "--port=1" in shown
    assert found["argv"][1:-1] == list(WORDS)


async def test_the_number_of_a_descriptor_stands_behind_the_words() -> None:
    shown, found = await started(*WORDS)
    assert found["argv"][-1] == shown[-1]
    assert int(shown[-1]) in found["descriptors"]


async def test_nothing_that_the_process_starts_gets_its_secrets() -> None:
    _, found = await started(*WORDS)
    assert TRUE_WORDS not in found["environment"]
    assert SECRET not in json.dumps(found["environment"])


def test_a_process_without_secrets_is_started_as_ever() -> None:
    command, environment = start_of("a.module", ("m", "--port=1"), {"A": "b"}, 7)
    assert command == (sys.executable, "-m", "a.module", "m", "--port=1", "7")
    assert environment == {"A": "b"}


async def test_the_guard_of_a_users_server_shows_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "words"
    code = (
        "import os, sys, time\n"
        f"open({str(file)!r}, 'w').write(repr((sys.argv[1:], {TRUE_WORDS!r} in os.environ)))\n"
        "time.sleep(600)"
    )
    made = await ServerProcess.start(
        [sys.executable, "-c", code, "--api-key", SECRET], dict(os.environ)
    )
    try:
        await until(lambda: file.exists() and file.read_text().endswith(")"))
        guard = psutil.Process(psutil.Process(made.pid).ppid()).cmdline()
    finally:
        await made.stop()
    assert "kvmig.command.guard" in guard
    assert SECRET not in " ".join(guard)
    assert file.read_text() == repr((["--api-key", SECRET], False))
