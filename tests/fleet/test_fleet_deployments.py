"""A deployment that is asked for instances, by its events and the answers to the orders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from kvmig.asgi.body_bounds import ModelReach
from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import StartupError
from kvmig.core.order_fence import TOKEN_HEADER, OrderToken
from kvmig.fleet.deployments import DeploymentEvent, DeploymentWatcher, OrderUnanswered
from kvmig.fleet.flag_rolls import RolledStart, RollStep
from kvmig.proxy.messages import ModelCard
from tests.support.waiting import until

EVENTS_S = 0.2
"""Between what a deployment does and the event that says so."""


def answer(writer: asyncio.StreamWriter, value: object, status: bytes = b"200 OK") -> None:
    body = msgspec.json.encode(value)
    writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)


class Deployment:
    """Answers orders at once and tells of them later, as one does."""

    def __init__(self) -> None:
        self.rows = [InstanceRow(id="i0", state="serving"), InstanceRow(id="i1", state="serving")]
        self.silent = False
        self.nonsense = 0
        """Events that can't be read, before the others."""
        self.handlers: list[asyncio.Task[None]] = []
        self.tokens: list[tuple[str, str]] = []
        """Last word of the path and the token of each request that has one."""
        self.deaf = False
        """Whether it answers no order."""
        self.loses_answers = False
        """Whether it carries out orders, and its answers get lost."""
        self.detail: str | None = None
        """All that an order to restart changes of its instance; None: its flags."""

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handlers.append(asyncio.create_task(self._answer(reader, writer)))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                if f"{TOKEN_HEADER}: " in head:
                    token = head.split(f"{TOKEN_HEADER}: ")[1].split("\r\n")[0]
                    self.tokens.append((path.rsplit("/", 1)[1], token))
                if path.endswith("/events"):
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    await self._events(reader, writer)
                    return
                if path == "/v1/models":
                    self._list(writer)
                    continue
                if path == "/kvmig/v1/model":
                    reach = {"tokens": 4096, "longest": 64, "media": False}
                    answer(writer, {"id": "m", "reach": reach})
                    continue
                if self.deaf:
                    return
                if method == "POST":
                    length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                    order = msgspec.json.decode(await reader.readexactly(length))
                    count = order.get("count", 0)
                    effect = {"flags": order.get("flags", "")}
                    if self.detail is not None:
                        effect = {"detail": self.detail}
                    self.rows = [
                        replace(one, **effect) if one.id in order.get("instances", ()) else one
                        for one in self.rows
                    ]
                    about = [
                        InstanceRow(id=f"i{len(self.rows) + one}", state="starting")
                        for one in range(count)
                    ]
                    self.rows += about
                else:
                    name = path.rsplit("/", 1)[1]
                    about = [InstanceRow(id=name, state="draining")]
                    self.rows = [one if one.id != name else about[0] for one in self.rows]
                if self.loses_answers:
                    return
                answer(writer, {"object": "list", "data": about}, b"201 Created")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone
        finally:
            writer.close()

    def _list(self, writer: asyncio.StreamWriter) -> None:
        model = {"id": "m", "created": 17, "owned_by": "vllm", "max_model_len": 4096, "root": "/x"}
        adapter = {"id": "a", "created": 18, "owned_by": "vllm", "parent": "m"}
        answer(writer, {"object": "list", "data": [adapter, model]})

    async def _events(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            if self.nonsense:
                self.nonsense -= 1
                writer.write(b'event: instances\ndata: {"data": 7}\n\n')
            elif not self.silent:
                told = msgspec.json.encode(DeploymentEvent(data=tuple(self.rows)))
                writer.write(b"event: instances\ndata: " + told + b"\n\n")
            await asyncio.sleep(EVENTS_S)


@pytest.fixture
def deployment() -> Deployment:
    return Deployment()


@pytest.fixture
async def watched(deployment: Deployment, tmp_path: Path) -> AsyncIterator[DeploymentWatcher]:
    """A watcher that has heard of the deployment."""
    socket = str(tmp_path / "d.sock")
    async with await asyncio.start_unix_server(deployment.accept, socket):
        made = DeploymentWatcher(socket, lambda: None, term=17)
        await asyncio.wait_for(made.looked.wait(), 10)
        yield made
        await made.close()
        await asyncio.gather(*deployment.handlers)


async def test_instances_that_were_added_are_told_of_when_the_order_returns(
    watched: DeploymentWatcher,
) -> None:
    await watched.add(2)
    assert [one.id for one in watched.told.data] == ["i0", "i1", "i2", "i3"]


async def test_an_instance_that_drains_is_told_as_such_when_the_order_returns(
    watched: DeploymentWatcher,
) -> None:
    await watched.drain("i1")
    assert [one.state for one in watched.told.data] == ["serving", "draining"]


async def test_a_deployment_that_does_not_tell_what_it_was_ordered_is_given_up_in_time(
    deployment: Deployment, watched: DeploymentWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.silent = True
    monkeypatch.setattr("kvmig.fleet.deployments.TOLD_S", 0.3)
    with pytest.raises(StartupError, match=r"does not report i2 within 0\.3 s"):
        await watched.add(1)


async def test_after_an_order_without_an_answer_another_contact_shows_what_is_there(
    deployment: Deployment, watched: DeploymentWatcher
) -> None:
    await watched.settle()
    assert watched.token == OrderToken(17, 1)
    watched.note_unanswered()
    deployment.rows = [InstanceRow(id="i9", state="serving")]
    await watched.settle()
    assert watched.token == OrderToken(17, 2)
    assert [one.id for one in watched.told.data] == ["i9"]
    await watched.settle()
    assert watched.token == OrderToken(17, 2), "nothing is unknown any more"


async def test_without_another_contact_nothing_is_known(
    deployment: Deployment, watched: DeploymentWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.silent = True
    monkeypatch.setattr("kvmig.fleet.deployments.TOLD_S", 0.1)
    watched.note_unanswered()
    for _ in range(2):
        with pytest.raises(StartupError, match=r"reports nothing within 0\.1 s"):
            await watched.settle()


async def test_one_that_is_followed_no_more_is_asked_for_nothing(
    watched: DeploymentWatcher,
) -> None:
    await watched.close()
    with pytest.raises(StartupError, match="it has ended"):
        await watched.drain("i0")


async def test_a_deployment_whose_event_can_not_be_read_is_followed_on(
    deployment: Deployment, watched: DeploymentWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    deployment.nonsense = 1
    await until(lambda: not watched.told.data)
    deployment.rows = deployment.rows[:1]
    await until(lambda: [one.id for one in watched.told.data] == ["i0"])
    assert "could not be taken" in caplog.text


async def test_a_deployment_that_serves_is_asked_what_its_model_is_like(
    watched: DeploymentWatcher,
) -> None:
    await until(lambda: watched.card)
    reach = ModelReach(4096, 64, media=False)
    assert watched.card == ModelCard(created=17, owned_by="vllm", max_model_len=4096, reach=reach)


async def test_an_order_has_the_token_of_the_contact_that_it_was_decided_by(
    deployment: Deployment, watched: DeploymentWatcher
) -> None:
    await watched.add(1)
    await watched.drain("i1")
    assert deployment.tokens == [("events", "17.1"), ("instances", "17.1"), ("i1", "17.1")]


async def test_after_an_order_without_an_answer_another_contact_begins(
    deployment: Deployment, watched: DeploymentWatcher
) -> None:
    """The order may be carried out late, and then what is known is too old for another one."""
    deployment.deaf = True
    with pytest.raises(StartupError, match="it doesn't answer"):
        await watched.add(1)
    deployment.deaf = False
    await until(lambda: watched.serving)
    await watched.add(1)
    assert deployment.tokens == [
        ("events", "17.1"), ("instances", "17.1"), ("events", "17.2"), ("instances", "17.2"),
    ]  # fmt: skip


RESTART = RollStep("i1", RolledStart("--max-num-seqs=8"))


async def test_an_order_of_which_only_the_answer_got_lost_is_found_carried_out(
    deployment: Deployment, watched: DeploymentWatcher
) -> None:
    deployment.loses_answers = True
    await watched.restart(RESTART)
    assert watched.told.data[1].flags == "--max-num-seqs=8"
    assert await watched.add(2) == {"i2", "i3"}
    await watched.drain("i1")
    assert watched.told.data[1].state == "draining"
    orders = [word for word, _ in deployment.tokens if word != "events"]
    assert orders == ["restart", "instances", "i1"]


@pytest.mark.parametrize("before", ["serving", "draining"])
async def test_a_restart_that_awaits_its_turn_or_was_ordered_before_is_known_without_a_wait(
    deployment: Deployment,
    watched: DeploymentWatcher,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
) -> None:
    monkeypatch.setattr("kvmig.fleet.deployments.TOLD_S", 2.0)
    deployment.detail = "starts again when its turn comes" if before == "serving" else ""
    deployment.rows[1] = replace(deployment.rows[1], state=before)
    await until(lambda: watched.told.data[1:] and watched.told.data[1].state == before)
    await watched.restart(RESTART)
    assert watched.told.data[1].detail == deployment.detail


async def test_of_an_order_that_nobody_carries_out_it_is_known_that_it_never_will_be(
    deployment: Deployment, watched: DeploymentWatcher
) -> None:
    deployment.deaf = True
    for order in (watched.restart(RESTART), watched.drain("i1"), watched.add(1)):
        with pytest.raises(OrderUnanswered, match="it doesn't answer"):
            await order
        assert [one.id for one in watched.told.data] == ["i0", "i1"]
