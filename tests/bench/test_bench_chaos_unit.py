"""When a unit is whole again, as `bench.chaos --units` sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.chaos.unit import whole
from kvmig.sharing.messages import MemberShare


@pytest.fixture
def member() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def share(process: int, *, connected: bool) -> MemberShare:
    return MemberShare(
        instance="i0", model="count", process=process, guarantee=0, quota=0, lease=0, used=0,
        cached=0, wanted=0, connected=connected,
    )  # fmt: skip


def test_a_unit_is_whole_once_all_members_that_run_are_connected(
    member: subprocess.Popen[bytes],
) -> None:
    assert not whole([member.pid], [])
    assert not whole([member.pid], [share(member.pid, connected=False)])
    assert whole([member.pid], [share(member.pid, connected=True)])


def test_a_member_that_is_stopped_is_not_waited_for(member: subprocess.Popen[bytes]) -> None:
    member.send_signal(signal.SIGSTOP)
    os.waitpid(member.pid, os.WUNTRACED)  # until it has stopped
    assert whole([member.pid], [])


def test_a_member_that_has_ended_is_not_waited_for(member: subprocess.Popen[bytes]) -> None:
    member.kill()
    member.wait()
    assert whole([member.pid], [])
