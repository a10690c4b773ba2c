"""Either end of a prompt's handover is killed at each of its states: the stream has its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.served import SMALL, Served
from tests.e2e.test_serve_prompts import begin, states
from tests.support import kill_hooks
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import counted
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

LEASE = ("--reply-timeout-ms=5000", "--lease-ms=10000")
"""What a killed source leaves reserved is free again soon."""
TRIES = 5
"""A prompt that is computed before its handover has begun stays where it is."""
POINTS = (*kill_hooks.SOURCE, "SourceSession FollowPrompt before", *kill_hooks.DESTINATION)


@pytest.fixture(scope="module")
def kill_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills") / "at"


@pytest.fixture(scope="module")
def server(nursery: Nursery, kill_file: Path) -> Iterator[Served]:
    flags = [
        *SMALL, *LEASE, "--instances=2", "--prompt-instances=i0", "--no-enable-prefix-caching",
        "--max-num-batched-tokens=64", "--heartbeat-timeout=20", "--shutdown-timeout=5",
        *kill_hooks.flags(kill_file),
    ]  # fmt: skip
    log = kill_file.with_name("log")
    with leaving_nothing(Served(flags, nursery=nursery, log=log)) as made:
        yield made


@pytest.fixture
async def served(server: Served) -> Served:
    await until_yes(lambda: states(server) == {"i0": "serving", "i1": "serving"})
    return server


@pytest.mark.parametrize("point", POINTS)
async def test_the_stream_has_its_tokens(served: Served, kill_file: Path, point: str) -> None:
    number = 1000 + 100 * POINTS.index(point)
    kill_hooks.kill_at(point, kill_file)
    for _ in range(TRIES):
        counted(await begin(served, number).end(), number)
        if kill_hooks.was_killed(kill_file):
            break
    kill_hooks.assert_killed(kill_file)
    await until_yes(lambda: not any(row["blocks_used"] for row in served.get("instances")))
    assert_server_is_empty(served)
