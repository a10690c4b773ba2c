"""Either end of a session's move is killed at each of its states: the next turn is what it would
have been, and nothing stays reserved."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF
from tests.e2e.test_serve_prompts import states
from tests.e2e.test_serve_sessions import BEGINNING, post, turn, used
from tests.support import kill_hooks
from tests.support.leaks import leaving_nothing
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

LEASE = ("--reply-timeout-ms=5000", "--lease-ms=10000")
"""What a killed source leaves reserved is free again soon."""


@pytest.fixture(scope="module")
def kill_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills") / "at"


@pytest.fixture(scope="module")
def served(nursery: Nursery, kill_file: Path) -> Iterator[Served]:
    flags = [
        *SMALL, *LEASE, "--instances=2", NEVER_BY_ITSELF, "--enable-prompt-tokens-details",
        "--heartbeat-timeout=20", "--shutdown-timeout=5", *kill_hooks.flags(kill_file),
    ]  # fmt: skip
    log = kill_file.with_name("log")
    with leaving_nothing(Served(flags, nursery=nursery, log=log)) as made:
        yield made


@pytest.fixture(scope="module")
def stayed(served: Served) -> tuple[str, str]:
    """The two answers of a session that never moves."""
    session = secrets.token_hex(8)
    first, _ = turn(served, session, BEGINNING)
    return first, turn(served, session, f"{BEGINNING}{first} ")[0]


@pytest.mark.parametrize("point", [*kill_hooks.SOURCE, *kill_hooks.DESTINATION])
async def test_the_next_turn_is_what_it_would_have_been(
    served: Served, kill_file: Path, stayed: tuple[str, str], point: str
) -> None:
    session, (first, second) = secrets.token_hex(8), stayed
    assert turn(served, session, BEGINNING)[0] == first
    kill_hooks.kill_at(point, kill_file)
    answer = await asyncio.to_thread(post, served, "/kvmig/v1/sessions/move", {"session": session})
    kill_hooks.assert_killed(kill_file, answer.text)
    of_source = point in kill_hooks.SOURCE
    if of_source:
        assert answer.status_code == 503, answer.text
    else:
        assert (answer.status_code, answer.json()["state"]) == (200, "aborted"), answer.text

    text, found = await asyncio.to_thread(turn, served, session, f"{BEGINNING}{first} ")

    assert text == second
    if of_source and point != kill_hooks.SOURCE[-1]:
        assert found == 0, "the only copy is gone"
    else:
        assert found > len(BEGINNING), "a whole copy is where it serves"
    await until_yes(lambda: states(served) == {"i0": "serving", "i1": "serving"})
    await until_yes(lambda: used(served) == 0)
