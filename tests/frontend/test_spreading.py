"""The front end's part of a pause that is spread: what it holds, and what it never does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.messages import Migrated, PauseAhead
from kvmig.core.errors import Failure
from kvmig.frontend.ports import OutputItem, RouterObserver
from kvmig.frontend.requests import RequestTable
from kvmig.frontend.streams import GIVE_UP_S, RequestStreams
from tests.support.fake_llumlet import Cluster, FakeLlumlet, Tokens, decode, report
from tests.support.inside import spread_pauses, streams_of
from tests.support.skipped_time import Skip, skipped_time

if TYPE_CHECKING:
    from kvmig.frontend.ports import InstancePort

SOURCE, DESTINATION = 0, 1
TURNS = 5
"""Of the event loop: whatever is due by now has run."""


@dataclass
class Client:
    """A `Sink` that keeps what comes, with nobody's order but its own."""

    came: dict[str, list[int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    metas: list[object] = field(default_factory=list)

    def deliver(self, index: int, items: Sequence[OutputItem], meta: object) -> None:
        for item in items:
            assert item.request_id not in self.failed
            self.came.setdefault(item.request_id, []).extend(item.new_token_ids)
        if meta is not None:
            self.metas.append(meta)

    def finish(self, request_ids: Sequence[str]) -> None:
        raise AssertionError(request_ids)

    def fail(self, request_ids: Sequence[str], reason: str, kind: Failure) -> None:
        self.failed += request_ids


@dataclass
class Scene:
    client: Client
    streams: RequestStreams
    skip: Skip

    def step(self, *tokens: int, request_id: str = "r", index: int = SOURCE) -> None:
        self.deliver(index, [Tokens(request_id, [one]) for one in tokens], None)

    def deliver(self, index: int, items: Sequence[OutputItem], meta: object) -> None:
        self.client.deliver(index, self.streams.due(index, items), meta)

    async def passes(self, seconds: float) -> None:
        self.skip(seconds)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    @property
    def came(self) -> list[int]:
        return self.client.came.get("r", [])


@asynccontextmanager
async def set_scene() -> AsyncIterator[Scene]:
    with skipped_time() as skip:
        client = Client()
        streams = RequestStreams(
            RequestTable(),
            client,
            decode,
            cast("InstancePort", None),
            RouterObserver(),
            asyncio.get_running_loop().time,
        )
        try:
            yield Scene(client, streams, skip)
        finally:
            streams.close()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with set_scene() as made:
        yield made


async def test_each_token_is_held_a_little_longer_than_the_one_before_up_to_the_pause(
    scene: Scene,
) -> None:
    scene.streams.spread("r", SOURCE, pause_s=5.0, stretch_s=0.4)
    for number, held_s in enumerate((0.4, 0.8, 1.0, 1.0)):  # 1 s is the most
        scene.step(number)
        await scene.passes(held_s - 0.05)
        assert number not in scene.came
        await scene.passes(0.06)
        assert scene.came[-1] == number


async def test_tokens_of_other_requests_and_statistics_go_on_at_once(scene: Scene) -> None:
    scene.streams.spread("r", SOURCE, 5.0, 0.4)
    items = [Tokens("r", [1]), Tokens("other", [2])]
    scene.deliver(SOURCE, items, "statistics")
    assert scene.client.came == {"other": [2]}
    assert scene.client.metas == ["statistics"]


async def test_the_new_owners_first_token_is_not_held_and_comes_after_what_was(
    scene: Scene,
) -> None:
    scene.streams.spread("r", SOURCE, 5.0, 0.4)
    scene.step(1)
    scene.step(2)
    scene.step(3, index=DESTINATION)
    scene.step(4, index=DESTINATION)
    assert scene.came == [1, 2, 3, 4]
    assert spread_pauses(scene.streams) == 0


async def test_a_request_that_ends_before_its_pause_is_not_held(scene: Scene) -> None:
    scene.streams.spread("r", SOURCE, 5.0, 0.4)
    scene.step(1)
    scene.deliver(SOURCE, [Tokens("r", [2], finished=True)], None)
    assert scene.came == [1, 2]
    assert spread_pauses(scene.streams) == 0


async def test_a_request_that_fails_gets_what_was_held_first(scene: Scene) -> None:
    scene.streams.spread("r", SOURCE, 5.0, 0.4)
    scene.step(1)
    scene.streams.fail(["r"], "its instance is lost", "retry")
    assert scene.came == [1]
    assert scene.client.failed == ["r"]


async def test_a_pause_that_never_comes_is_given_up(scene: Scene) -> None:
    scene.streams.spread("r", SOURCE, 5.0, 0.4)
    scene.step(1)
    await scene.passes(GIVE_UP_S + 0.1)
    assert spread_pauses(scene.streams) == 0
    scene.step(2)
    assert scene.came == [1, 2]


async def test_nothing_is_delivered_after_the_close(scene: Scene) -> None:
    scene.streams.spread("r", SOURCE, 5.0, 0.4)
    scene.step(1)
    scene.streams.close()
    await scene.passes(20.0)
    assert scene.came == []


STEP, BEGIN, END, MOVE, WAIT = "step", "begin", "end", "move", "wait"


@given(st.lists(st.tuples(st.sampled_from([STEP, BEGIN, END, MOVE, WAIT]), st.floats(0, 3))))
def test_whatever_it_is_told_all_tokens_come_once_and_in_order(
    events: list[tuple[str, float]],
) -> None:
    async def run() -> tuple[list[int], int]:
        async with set_scene() as it:
            given_out, index = 0, SOURCE
            for event, number in events:
                if event == STEP:
                    it.step(given_out, index=index)
                    given_out += 1
                elif event == BEGIN:
                    it.streams.spread("r", index, number, number / 4)
                elif event == END:
                    it.streams.end_spread("r")
                elif event == MOVE:
                    index = 1 - index
                else:
                    await it.passes(number)
            await it.passes(GIVE_UP_S + 1.0)
            assert spread_pauses(it.streams) == 0
            return it.came, given_out

    came, given_out = asyncio.run(run())
    assert came == list(range(given_out))


# -- in the router


def tokens(it: Cluster) -> list[int]:
    return it.front.tokens.get("r", [])


async def foretold(it: Cluster, llumlet: FakeLlumlet) -> None:
    """A pause of a second, over one token."""
    llumlet.send(PauseAhead("r", 1000.0, 1000.0))
    llumlet.step(("r", 0, 0, [7]))
    llumlet.step(("other", 0, 0, []))
    await it.front.until(lambda: len(it.front.metas) >= 2)
    assert tokens(it) == []


async def test_a_stream_whose_pause_is_foretold_is_held_until_its_new_owner_goes_on(
    it: Cluster,
) -> None:
    llumlet = await it.submit()
    other = it.others(llumlet)[0]
    await foretold(it, llumlet)
    other.step(("r", 1, 1, [8]))
    await it.front.until(lambda: tokens(it) == [7, 8])


async def test_a_migration_that_is_aborted_holds_nothing_any_more(it: Cluster) -> None:
    llumlet = await it.submit()
    await foretold(it, llumlet)
    llumlet.send(Migrated(0, report("r", llumlet.instance, "x", "no_blocks")))
    await it.front.until(lambda: tokens(it) == [7])


async def test_a_client_that_leaves_leaves_nothing_held(it: Cluster) -> None:
    llumlet = await it.submit()
    await foretold(it, llumlet)
    await it.router.abort(["r"])
    assert spread_pauses(streams_of(it.router)) == 0


@pytest.mark.parametrize("told_by", ["another instance", "its own of another request"])
async def test_a_pause_of_a_request_that_is_not_there_is_ignored(it: Cluster, told_by: str) -> None:
    llumlet = await it.submit()
    other = it.others(llumlet)[0]
    if told_by == "another instance":
        other.send(PauseAhead("r", 1000.0, 1000.0))
        other.step(("nobody's", 0, 0, []))
        await it.front.until(lambda: bool(it.front.metas))
    else:
        llumlet.send(PauseAhead("s", 1000.0, 1000.0))
    llumlet.step(("r", 0, 0, [7]))
    await it.front.until(lambda: tokens(it) == [7])
