"""bench.chaos without a cluster: its judge, plan and faults, and when a unit is whole again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from bench.chaos import hooks
from bench.chaos.answers import RIGHT, Answer, Choice, judge, slip
from bench.chaos.calls import KINDS, MANNERS, Call, counted, draw
from bench.chaos.clients import Client, Ledger
from bench.chaos.hooks import ARMED, FIRED, NOW, strike
from bench.chaos.leaks import DESCRIPTORS, MEMORY_MIB, Holdings, Process, compare
from bench.chaos.place import Place
from bench.chaos.plan import AGENT, HANDSHAKE, plan
from bench.chaos.unit import whole
from bench.soak_samples import Sample, growth, steepest
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk
from kvmig.kvtransfer.source_machine import SourceMachine, SourceState
from kvmig.kvtransfer.transports.tcp import TcpInbox
from kvmig.sharing.messages import MemberShare

COUNTED = "".join(f" {one:04d}" for one in range(100, 400))


def answer(text: str, tokens: int | None = None, reason: str | None = "length") -> Answer:
    return Answer({0: Choice(text, finish_reason=reason)}, tokens)


@given(st.integers(0, 1000), st.integers(1, 150))
def test_lost_tokens_are_counted_wherever_they_are_missing(at: int, lost: int) -> None:
    verdict = slip(COUNTED[:at] + COUNTED[at + lost :], COUNTED)
    assert verdict.what
    assert (verdict.lost, verdict.repeated) == (lost, 0)


@given(st.integers(0, 1000), st.integers(1, 150))
def test_repeated_tokens_are_counted_wherever_they_are(at: int, twice: int) -> None:
    verdict = slip(COUNTED[: at + twice] + COUNTED[at:], COUNTED)
    assert verdict.what
    assert (verdict.lost, verdict.repeated) == (0, twice)


def test_a_right_answer_is_right_and_any_part_of_it_while_it_runs() -> None:
    wanted = answer(COUNTED, len(COUNTED))
    assert judge(answer(COUNTED, len(COUNTED)), wanted) == RIGHT
    assert judge(answer(COUNTED[:77], None, None), wanted, whole=False) == RIGHT
    assert judge(answer(COUNTED[:77], 77), wanted).lost == len(COUNTED) - 77


def test_what_else_differs_is_told() -> None:
    wanted = answer("ab", 2)
    assert "ended with stop" in judge(answer("ab", 2, "stop"), wanted).what
    assert "usage says 3" in judge(answer("ab", 3), wanted).what
    assert "choices []" in judge(Answer({}, 2), wanted).what
    other = Answer({0: Choice("ab", [("a", -1.0), ("b", -2.0)], "length")}, 2)
    near = Answer({0: Choice("ab", [("a", -1.0), ("b", -2.0005)], "length")}, 2)
    far = Answer({0: Choice("ab", [("a", -1.0), ("b", -2.1)], "length")}, 2)
    assert judge(near, other) == RIGHT
    assert "log-probability 1" in judge(far, other).what


def test_chunks_of_both_apis_are_put_together() -> None:
    seen = Answer()
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{}]}
    assert seen.take({"choices": [{"index": 0, "text": "a", "logprobs": logprobs}]})
    chat = {"index": 1, "delta": {"content": "b"}, "finish_reason": "stop",
            "logprobs": {"content": [{"token": "b", "logprob": -1.5}]}}  # fmt: skip
    assert seen.take({"choices": [chat]})
    assert not seen.take({"choices": [], "usage": {"completion_tokens": 2}})
    assert seen.choices[0] == Choice("a", [("a", -0.5)])
    assert (seen.choices[1], seen.tokens) == (Choice("b", [("b", -1.5)], "stop"), 2)


def test_a_seed_draws_the_same_calls_again_and_all_kinds_of_them() -> None:
    first, again = Random(5), Random(5)
    calls = [draw(first) for _ in range(500)]
    assert calls == [draw(again) for _ in range(500)]
    assert {one.kind for one in calls} == set(KINDS)
    assert {one.manner for one in calls} == set(MANNERS)
    stopped = next(one for one in calls if one.kind == "stop string" and counted(one).tokens)
    assert len(counted(stopped).choices[0].text) <= stopped.body["max_tokens"]


def test_every_third_fault_of_a_unit_kills_its_agent() -> None:
    faults = plan(3, 600, 6, units=True)
    killed = [one for one in faults if (one.deed, one.target) == ("kill", AGENT)]
    assert len(killed) >= len(faults) // 3 >= 20
    assert AGENT not in {one.target for one in plan(3, 600, 6)}


def test_a_seed_plans_the_same_faults_again_and_a_long_run_has_each() -> None:
    faults = plan(3, 3600, 6)
    assert faults == plan(3, 3600, 6)
    assert faults != plan(4, 3600, 6)
    hit = {(one.deed, one.target) for one in faults}
    assert {target for deed, target in hit if deed == "kill"} >= set(HANDSHAKE)
    assert {"transport", "shm", "log", "clock", "scheduler", "front-end"} <= {t for _, t in hit}
    assert "source.committing" in HANDSHAKE
    assert {one.target for one in plan(3, 3600, 6, private=False)} & {"shm", "log"} == set()


@pytest.fixture
def place() -> Iterator[Place]:
    with Place(private=False) as made:
        yield made


def test_an_armed_state_strikes_once_and_says_whom(place: Place) -> None:
    (place.folder / ARMED / "source.copying").write_text("squeeze")
    with pytest.raises(MemoryError, match="in state"):
        strike(place.folder, "source.copying")
    strike(place.folder, "source.copying")
    assert (place.folder / FIRED / f"source.copying.{os.getpid()}").exists()
    assert not list((place.folder / NOW).iterdir())


def test_a_place_knows_its_processes_and_leaves_nothing(place: Place) -> None:
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **place.environment}) as child:
        until = time.monotonic() + 20
        while place.processes() != [child.pid]:  # its environment is there a moment after it is
            assert time.monotonic() < until
            time.sleep(0.01)
        child.kill()
    assert place.processes() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_full_to_the_last_byte_and_free_again() -> None:
    try:
        place = Place()
    except subprocess.CalledProcessError:
        pytest.skip("no mount namespaces here")
    with place:
        place.log.write_bytes(b"a line\n")
        for what in ("log", "shm"):
            place.fill(what, True)
        with pytest.raises(OSError, match="No space"), place.log.open("ab", buffering=0) as file:
            file.write(b"x")
        with pytest.raises(OSError, match="No space"):
            (place.shm / "kvmig-more").write_bytes(b"x")
        for what in ("log", "shm"):
            place.fill(what, False)
        (place.shm / "kvmig-more").write_bytes(b"x")
        assert place.left_in_shm() == ["kvmig-more"]


def test_a_place_is_gone_after_its_block() -> None:
    with Place(private=False) as made:
        folder = made.folder
    assert not Path(folder).exists()


def test_what_is_left_over_is_a_leak_beyond_what_is_allowed() -> None:
    before = Holdings([Process(1, "launcher", 50, 5, 100.0)])
    after = Holdings(
        [Process(1, "launcher", 53 + DESCRIPTORS, 5, 110.0 + MEMORY_MIB)],
        rows=[{"state": "serving", "blocks_used": 8, "running": 1, "staging_used": 2}],
        orphans=["kvmig-x"],
        strangers=[7],
    )
    assert set(compare(before, before).values()) == {0}
    assert compare(before, after) == {
        "leaked_blocks": 8, "leaked_requests": 1, "instances_not_well": 0,
        "leaked_staging_buffers": 2, "leaked_shared_memory": 1, "stray_processes": 1,
        "leaked_fds": 3, "leaked_memory_mib": 10,
    }  # fmt: skip


def test_the_hooks_see_every_state_that_a_machine_enters(place: Place) -> None:
    machine = SourceMachine("k", 1)
    (place.folder / ARMED / "source.reserving").write_text("squeeze")
    try:
        hooks.install(place.folder)
        with pytest.raises(MemoryError):
            machine.exported(10)
    finally:
        mock.patch.stopall()
    assert machine.state is SourceState.RESERVING


async def test_a_corrupt_transport_changes_what_arrives_while_its_order_is_there(
    place: Place,
) -> None:
    chunk = Chunk("m", 0, 0, PAYLOAD_SLOT, 4, [1])
    corrupt = place.folder / NOW / "corrupt"
    receive = hooks.garbled(TcpInbox.receive, corrupt)
    assert bytes(await receive(TcpInbox(), chunk, b"abcd")) == b"abcd"
    corrupt.touch()
    assert bytes(await receive(TcpInbox(), chunk, b"abcd")) == b"ab#d"


@pytest.mark.parametrize(
    ("told", "lost", "repeated", "error"),
    [(" 0010 0011", 0, 0, ""), (" 0010 011", 1, 0, ""), (" 0010 0010 0011", 0, 5, ""),
     (" 0010", 0, 0, "ClientPayloadError")],
)  # fmt: skip
async def test_a_client_finds_what_a_server_does_wrong(
    told: str, lost: int, repeated: int, error: str
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for at, letter in enumerate(told):
            ended = "length" if at == len(told) - 1 else None
            choice = {"index": 0, "text": letter, "finish_reason": ended}
            await response.write(b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode())
        if not error:
            usage = {"choices": [], "usage": {"completion_tokens": 10}}
            await response.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(usage).encode())
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    call = Call("greedy", "/v1/completions", {"max_tokens": 10}, number=10)
    server = TestServer(app)
    await server.start_server()
    try:
        async with Client(f"http://127.0.0.1:{server.port}", "count", Ledger()) as client:
            outcome, _ = await client.ask(call, counted(call))
    finally:
        await server.close()
    assert (outcome.verdict.lost, outcome.verdict.repeated) == (lost, repeated)
    assert bool(outcome.verdict.what) == bool(lost or repeated)
    assert (outcome.error, outcome.broken) == (error, bool(error))


def sample(at_s: float, pid: int, mib: float) -> Sample:
    return Sample(at_s, pid, "instance", mib, mib, 50, 9)


def test_growth_is_that_of_the_line_through_all_samples() -> None:
    over, hourly = growth([0.0, 10.0, 20.0], [5.0, 6.0, 7.0])
    assert over == pytest.approx(2.0)
    assert hourly == pytest.approx(360.0)


def test_a_soak_counts_who_lived_long_after_the_warm_up_and_the_worst_of_them() -> None:
    times = [float(at) for at in range(0, 101, 10)]
    steady = [sample(at, 1, 300.0 if at < 25 else 310.0) for at in times]  # it has warmed up
    leaking = [sample(at, 2, 300.0 + at) for at in times]
    brief = [sample(at, 3, 300.0 + 9 * at) for at in times[-6:]]
    summary = steepest([*steady, *leaking, *brief], 100.0)
    assert summary["instance rss_mib growth"] == pytest.approx(70.0)
    assert summary["instance fds growth"] == pytest.approx(0.0)
    assert steepest(steady, 100.0)["instance rss_mib growth"] == pytest.approx(0.0)
    longest = steepest(brief, 100.0)  # nobody lived longer
    assert longest["instance rss_mib growth"] > 0


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
