"""The step gate between members and their agent, over its socket."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmig.engines.base import KVUse
from kvmig.engines.entrance import StepAdmission
from kvmig.engines.gate import EVERYTHING, ComputeShares, StepGrant, StepRequest
from kvmig.rpc.unix_packets import UnixPackets
from kvmig.sharing.lease_ledger import MIB, MemberClaim
from kvmig.sharing.member import UnitMember
from kvmig.sharing.messages import (
    MOST_BYTES,
    VERSION,
    MemberHello,
    MemberRefused,
    StepDone,
    encode,
    to_member,
)
from kvmig.sharing.step_gate import UnitGate
from kvmig.sharing.step_scheduler import StepScheduler
from tests.support import unit_site
from tests.support.unit_site import agent
from tests.support.waiting import until

PROMPTS = StepRequest(prompt_tokens=100, decodes=0, oldest_prompt=1.0)
DECODES = StepRequest(prompt_tokens=0, decodes=3, oldest_decode=1.0)
PATIENCE_S = 20.0


async def resize(quota: int, limit: int) -> None:
    """It has as much as it is told."""


@contextlib.asynccontextmanager
async def joined(path: Path, name: str, decode: int = 6) -> AsyncIterator[UnitGate]:
    claim = MemberClaim("llama", 4 * MIB, 64 * MIB, MIB, 0)
    shares = ComputeShares(10, decode)
    one = UnitMember(
        str(path), name, claim, lambda: KVUse(0, 0, 0, 0), lambda on_use: None, resize, shares
    )
    async with unit_site.joined(one):
        yield one.gate


async def grant_of(gate: UnitGate) -> StepGrant:
    found: list[StepGrant] = []

    def look() -> bool:
        grant = gate.answer()
        found.extend([] if grant is None else [grant])
        return bool(found)

    await until(look)
    return found[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "unit"


async def test_members_take_turns_and_who_is_alone_asks_nobody(path: Path) -> None:
    turns = StepScheduler()
    async with agent(path, turns=turns), joined(path, "a") as a:
        assert a.alone
        async with joined(path, "b") as b:
            await until(lambda: not a.alone and not b.alone)
            a.request_step(PROMPTS)
            assert (await grant_of(a)).prompts
            b.request_step(PROMPTS)
            await asyncio.sleep(0.05)
            assert b.answer() is None
            a.finish_step()
            assert (await grant_of(b)).prompts
            a.request_step(DECODES)
            b.finish_step()
            grant = await grant_of(a)
            assert (grant.prompts, grant.parts) == (False, 6)
            a.finish_step()
        await until(lambda: a.alone)
        assert turns.job_seconds["b", "prefill"] > 0


async def test_decodes_go_on_without_asking_until_somebody_waits(path: Path) -> None:
    async with agent(path, turns=StepScheduler()), joined(path, "a") as a, joined(path, "b") as b:
        for gate in (a, b):
            gate.request_step(DECODES)
            assert (await grant_of(gate)).stands
            gate.finish_step()
            assert gate.reuse_grant() is not None
        a.finish_step()
        a.request_step(PROMPTS)
        await until(lambda: b.reuse_grant() is None)
        assert a.answer() is None, "b makes a step"
        b.finish_step()
        assert (await grant_of(a)).prompts


async def test_a_member_whose_connection_ends_frees_its_parts(path: Path) -> None:
    async with agent(path, turns=StepScheduler()), joined(path, "b") as b:
        async with joined(path, "a") as a, joined(path, "c"):
            a.request_step(PROMPTS)
            await grant_of(a)
            b.request_step(PROMPTS)
            await asyncio.sleep(0.05)
            assert b.answer() is None
        assert b.alone or (await grant_of(b)).prompts


async def test_a_member_that_is_stopped_in_a_step_frees_its_parts_after_a_while(
    path: Path,
) -> None:
    turns = StepScheduler(job_s=0.2)
    async with agent(path, turns=turns), joined(path, "a") as a, joined(path, "b") as b:
        a.request_step(PROMPTS)
        await grant_of(a)  # and never says that it is done
        b.request_step(PROMPTS)
        assert (await grant_of(b)).prompts
        assert turns.overdue == 1
        a.finish_step()
        b.finish_step()
        a.request_step(DECODES)
        await grant_of(a)


async def test_an_agent_that_dies_lets_everybody_step(path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with agent(path, turns=StepScheduler()):
            a = await stack.enter_async_context(joined(path, "a"))
            await stack.enter_async_context(joined(path, "b"))
            await until(lambda: not a.alone)
        await until(lambda: a.alone)
        assert StepAdmission(a, lambda left: None).enter(lambda: PROMPTS) is EVERYTHING
        async with agent(path, turns=StepScheduler()):
            await until(lambda: not a.alone)
            a.request_step(PROMPTS)
            await grant_of(a)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (ComputeShares(11, 4), r"shares are \(11, 4\), must be 1 to 10"),
        (ComputeShares(4, 0), r"shares are \(4, 0\), must be 1 to 10"),
        (StepDone(1), "Done isn't expected before Gated"),
    ],
)
async def test_what_can_not_be_is_refused_in_one_sentence(
    path: Path, message: ComputeShares | StepDone, why: str
) -> None:
    async with agent(path, turns=StepScheduler()), joined(path, "a") as a:
        packets = UnixPackets.connect(str(path), MOST_BYTES)
        packets.send(encode(MemberHello(VERSION, "bad", "llama", 4 * MIB, 64 * MIB, MIB)))
        packets.send(encode(message))
        said = ""
        async with asyncio.timeout(PATIENCE_S):
            while packet := await packets.recv():
                if isinstance(heard := to_member.decode(packet), MemberRefused):
                    said = heard.why
        packets.close()
        assert re.search(why, said), said
        assert a.alone
