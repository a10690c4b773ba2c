"""A host that stands by: its clients' calls are answered by the proxies of the host that leads."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmig.asgi.uvicorn_task import HttpTask, uvicorn_server
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import HttpConfig
from kvmig.proxy import leading_host, standby_relay
from kvmig.proxy.call import CLIENT_ADDRESS, DoorConnection
from kvmig.proxy.door_server import PeerServer
from kvmig.proxy.leading_host import HostLink
from kvmig.proxy.messages import LeadingHost
from kvmig.proxy.peer_tls import peer_certificate, peer_context
from kvmig.proxy.standby_relay import StandbyRelay
from tests.support.proxy_site import GRACE_S, PEPPER, Got, Site, key, site, streams
from tests.support.waiting import until


@dataclass
class OtherHost:
    """A host that stands by, and the host that leads."""

    leads: Site
    hosts: HostLink
    url: str
    door: str
    """Where the host that leads takes calls of relays."""

    def client(self, given: str | None = None) -> httpx.AsyncClient:
        bearer = {"authorization": f"Bearer {given or self.leads.key}"}
        return httpx.AsyncClient(base_url=self.url, headers=bearer, timeout=30)

    async def ask(self, given: str | None = None, **headers: str) -> httpx.Response:
        async with self.client(given) as client:
            body = {"model": "count"}
            return await client.post("/v1/chat/completions", json=body, headers=headers)


@asynccontextmanager
async def other_host(
    folder: Path,
    *grants: object,
    pepper: bytes = PEPPER,
    term: int = 5,
    clock: TimeSource = monotonic,
    **limits: Any,
) -> AsyncIterator[OtherHost]:
    """pepper: of the host that stands by. term: of the leader that it knows; 0: none. clock: of the
    host that leads."""
    for name, own in (("leads", PEPPER), ("stands-by", pepper)):
        (folder / name).mkdir()
        (folder / name / "pepper").write_bytes(own)
    async with site(folder, *grants, clock=clock) as leads:  # type: ignore[arg-type]
        peers = socket.create_server(("127.0.0.1", 0))
        door = "{}:{}".format(*peers.getsockname())
        server = PeerServer(folder / "leads" / "pepper", peers.detach())
        await server.begin(leads.door, HttpConfig(), leads.door.count_refused)
        hosts = HostLink(lambda: peer_context(folder / "stands-by" / "pepper", server=False))
        relay = StandbyRelay(hosts, HttpConfig(**limits))
        sock = socket.create_server(("127.0.0.1", 0))
        connection = DoorConnection.limited(5.0, lambda status: None)
        http = uvicorn_server(relay, connection, access_log=False)
        task = HttpTask(sock, lambda: http)
        try:
            await task.run(http.serve([sock]))
            made = OtherHost(leads, hosts, f"http://127.0.0.1:{sock.getsockname()[1]}", door)
            if term:
                hosts.take_leader(LeadingHost(term=term, door=door))
            yield made
        finally:
            await task.stop(GRACE_S)
            await server.stop(GRACE_S)
            await hosts.close()


async def test_a_call_is_answered_by_the_host_that_leads_and_its_answer_is_unchanged(
    tmp_path: Path,
) -> None:
    async def ten(got: Got) -> None:
        got.events()
        for number in range(10):
            got.chunk(b"data: %d\n\n" % number)
        got.last()

    async with other_host(tmp_path) as host, host.leads.deployment(ten) as deployment:
        here = await host.leads.ask({"model": "count"})
        there = await host.ask()
        assert there.content == here.content == b"".join(b"data: %d\n\n" % n for n in range(10))
        assert set(there.headers) == set(here.headers)
        one, other = deployment.got
        assert one.fields == other.fields


async def test_several_calls_of_one_connection_each_have_their_answer(tmp_path: Path) -> None:
    async with other_host(tmp_path) as host, host.leads.deployment(), host.client() as client:
        for _ in range(3):
            answer = await client.post("/v1/chat/completions", json={"model": "count"})
            assert answer.json() == {"ok": True}
        listed = await client.get("/v1/models/count")
        assert listed.json()["id"] == "count"
        assert (await client.head("/v1/models")).status_code == 200
        assert (await client.get("/v1/models/other")).status_code == 404


async def test_a_limit_of_a_key_is_the_same_through_both_hosts(tmp_path: Path) -> None:
    shown, grant = key(rpm=6)
    stopped = other_host(tmp_path, grant, clock=lambda: 100.0)  # else 10 s let a seventh call in
    async with stopped as host, host.leads.deployment():
        statuses = [
            answer.status_code
            for _ in range(5)
            for answer in (
                await host.ask(shown),
                await host.leads.ask({"model": "count"}, given=shown),
            )
        ]
        assert (statuses.count(200), statuses.count(429)) == (6, 4)


async def test_an_unknown_key_is_refused_as_at_the_host_that_leads(tmp_path: Path) -> None:
    async with other_host(tmp_path) as host:
        answer = await host.ask("kv-unknown")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_the_clients_address_is_the_one_that_the_other_host_sees(tmp_path: Path) -> None:
    """A client can't give itself another one, at neither host."""
    inside, grant_inside = key(cidrs=("127.0.0.0/8",))
    outside, grant_outside = key(cidrs=("10.0.0.0/8",))
    said = {CLIENT_ADDRESS.decode(): "10.0.0.1"}
    async with (
        other_host(tmp_path, grant_inside, grant_outside) as host,
        host.leads.deployment(),
    ):
        assert (await host.ask(inside)).status_code == 200
        assert (await host.ask(outside)).status_code == 403
        assert (await host.ask(outside, **said)).status_code == 403
        lied = await host.leads.ask({"model": "count"}, given=outside, headers=said)
        assert lied.status_code == 403


async def test_a_host_with_another_pepper_reaches_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_relay, "WAIT_S", 0.3)
    async with (
        other_host(tmp_path, pepper=b"q" * 32) as host,
        host.leads.deployment() as deployment,
    ):
        answer = await host.ask()
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "no host of the fleet serves now, try again"
        assert not deployment.got


async def test_who_does_not_know_the_pepper_gets_no_answer(tmp_path: Path) -> None:
    async with other_host(tmp_path) as host:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        address, port = host.door.split(":")
        reader, writer = await asyncio.open_connection(address, int(port), ssl=context)
        writer.write(host.leads.call({"model": "count"}))
        try:
            said = await reader.read()
        except (ssl.SSLError, ConnectionError):
            said = b""
        assert said == b""
        writer.close()


async def test_a_call_waits_until_a_host_leads(tmp_path: Path) -> None:
    async with other_host(tmp_path, term=0) as host, host.leads.deployment():
        waiting = asyncio.create_task(host.ask())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        host.hosts.take_leader(LeadingHost(term=5, door=host.door))
        assert (await waiting).json() == {"ok": True}


async def test_a_leader_of_an_earlier_term_takes_no_calls(tmp_path: Path) -> None:
    async with other_host(tmp_path) as host, host.leads.deployment():
        host.hosts.take_leader(LeadingHost(term=4, door="127.0.0.1:9"))
        assert (await host.ask()).status_code == 200


async def test_a_client_that_leaves_ends_its_call_at_the_deployment(tmp_path: Path) -> None:
    async with other_host(tmp_path) as host, host.leads.deployment(streams) as deployment:
        async with host.client() as client:
            body = {"model": "count", "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                await anext(answer.aiter_lines())
        await until(lambda: deployment.left == 1)


async def test_a_stream_of_a_host_that_was_followed_ends_with_an_error_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading_host, "FINISH_S", 0.3)
    async with other_host(tmp_path) as host, host.leads.deployment(streams):
        async with host.client() as client:
            body = {"model": "count", "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                host.hosts.take_leader(LeadingHost(term=6, door="127.0.0.1:9"))
                rest = [line async for line in lines if line.startswith("data: ")]
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["message"] == "the host that served ended while it answered"


async def test_a_body_that_is_too_large_goes_to_no_host(tmp_path: Path) -> None:
    async with other_host(tmp_path, max_body=1000) as host, host.leads.deployment() as deployment:
        async with host.client() as client:
            answer = await client.post("/v1/chat/completions", content=b"x" * 5000)
        assert answer.status_code == 413
        assert not deployment.got


async def test_the_host_itself_lives_while_no_host_leads(tmp_path: Path) -> None:
    async with other_host(tmp_path, term=0) as host, host.client() as client:
        assert (await client.get("/live")).status_code == 200


def test_all_hosts_of_a_fleet_make_the_same_certificate() -> None:
    assert peer_certificate(PEPPER) == peer_certificate(PEPPER)
    assert peer_certificate(PEPPER) != peer_certificate(b"q" * 32)


def test_the_certificates_key_is_for_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "pepper").write_bytes(PEPPER)
    peer_context(tmp_path / "pepper", server=True)
    assert (tmp_path / "peers.pem").stat().st_mode & 0o777 == 0o600
    assert sorted(one.name for one in tmp_path.iterdir()) == ["peers.pem", "pepper"]


def test_a_pepper_of_another_length_makes_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "pepper").write_bytes(b"")
    with pytest.raises(OSError, match="holds 0 bytes, must hold 32"):
        peer_context(tmp_path / "pepper", server=False)
