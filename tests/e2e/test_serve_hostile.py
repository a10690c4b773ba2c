"""A server among enemies: generated calls of its whole API, bodies made to hurt, prying eyes."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench.hostile_bodies import hostile_calls
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import Footprint, assert_server_is_empty, leaving_nothing
from tests.support.streams import count_from, counted, start_stream
from tests.support.toys import Toys

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a-shibboleth-of-this-test-alone"
FUZZ_S = 7
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MILLION = 10**6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """Small enough that no generated call takes long, and none starts a third instance."""
    flags = [
        *PATIENT, NEVER_BY_ITSELF, "--shutdown-timeout=5", "--max-instances=2",
        "--max-model-len=600", "--max-body=30MB",
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("hostile")
    with leaving_nothing(Toys(flags, folder, environment={"KVMIG_SECRET": SECRET})) as served:
        yield served


@pytest.fixture
def served(server: Toys) -> Iterator[Toys]:
    yield server
    assert_server_is_empty(server)


async def test_idle_clients_keep_no_instance_from_starting(tmp_path: Path) -> None:
    few = "sh", "-c", 'ulimit -n 300; exec "$@"', "sh"
    with Toys(["--max-instances=3"], tmp_path, enter=few) as served:
        instances = f"{served.url}/kvmig/v1/instances"
        async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S) as client:
            await client.get(instances)  # and connected, before the others
            idle = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(400)]
            added = await client.post(instances, json={})
            for _, writer in idle:
                writer.close()
    (row,) = added.json()["data"]
    assert (row["id"], row["detail"]) == ("i2", "")


def test_nobody_else_is_told_the_secret(served: Toys) -> None:
    assert served.process is not None
    launcher = psutil.Process(served.process.pid)
    children = launcher.children(recursive=True)
    assert len(children) >= 2
    for one in (launcher, *children):
        assert SECRET not in " ".join(one.cmdline())
    for one in children:
        assert "KVMIG_SECRET" not in one.environ()
    assert SECRET not in served.output()


def test_all_sockets_are_of_this_machine_only(served: Toys) -> None:
    listening = [
        ipaddress.ip_address(one.laddr.ip)
        for process in Footprint.of(served).processes
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3
    assert all(address.is_loopback for address in listening), listening


def test_shared_memory_is_for_this_user_only(served: Toys) -> None:
    files = Footprint.of(served).shared_memory
    assert len(files) >= 2
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def listened_at(served: Toys) -> set[int]:
    """Ports of all sockets that somebody may connect to, but the HTTP server's."""
    return {
        one.laddr.port
        for process in Footprint.of(served).processes
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    } - {served.port}


async def test_strangers_at_any_control_socket_are_counted_on_metrics(served: Toys) -> None:
    missing = {"launcher", "scheduler", *(row["id"] for row in served.get("instances"))}
    visited: set[int] = set()
    async with (
        asyncio.timeout(SERVER_PATIENCE_S),
        httpx.AsyncClient(base_url=served.url, verify=False) as http,
    ):
        while missing:
            for port in listened_at(served) - visited:  # the scheduler's may come a little later
                with socket.create_connection(("127.0.0.1", port), SERVER_PATIENCE_S) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1")
                visited.add(port)
            await asyncio.sleep(0.2)
            said = (await http.get("/metrics")).text
            labels = 'kvmig_messages_refused{{process="{}",reason="unauthenticated"}} 1.0'
            missing = {one for one in missing if labels.format(one) not in said}


BODIES: dict[str, tuple[str, bytes | dict[str, Any]]] = {
    "no JSON": (COMPLETIONS, b"{"),
    "nested deeply": (COMPLETIONS, b'{"prompt": "1", "a": ' + b"[" * 100_000),
    "no UTF-8": (COMPLETIONS, b'{"prompt": "\xff"}'),
    "half a surrogate pair": (COMPLETIONS, b'{"prompt": "\\ud800"}'),
    "half a pair in a chat": (CHAT, {"messages": [{"role": "user", "content": "\udc00"}]}),
    "half a pair in an option": (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": "\ud800"}},
    ),
    "digits": (COMPLETIONS, b'{"prompt": "1", "max_tokens": ' + b"9" * 5000 + b"}"),
    "max_tokens": (COMPLETIONS, {"prompt": "1", "max_tokens": 10**30}),
    "n": (COMPLETIONS, {"prompt": "1", "n": 10**9}),
    "seed": (COMPLETIONS, {"prompt": "1", "seed": 2**63}),
    "NaN": (COMPLETIONS, b'{"prompt": "1", "temperature": NaN}'),
    "token": (COMPLETIONS, {"prompt": [2**63]}),
    "stop token": (COMPLETIONS, {"prompt": "1", "stop_token_ids": [-1]}),
    "many stop tokens": (COMPLETIONS, {"prompt": "1", "stop_token_ids": [1] * MILLION}),
    "many stop strings": (COMPLETIONS, {"prompt": "1", "stop": ["a"] * MILLION}),
    "long stop string": (COMPLETIONS, {"prompt": "1", "stop": "a" * MILLION}),
    "many biases": (COMPLETIONS, {"prompt": "1", "logit_bias": dict.fromkeys(range(MILLION), 1)}),
    "long prompt": (COMPLETIONS, {"prompt": "a" * 20 * MILLION}),
    "many tokens": (COMPLETIONS, {"prompt": [1] * MILLION}),
    "long name": (COMPLETIONS, {"prompt": "1", "x" * MILLION: 1}),
    "large": (COMPLETIONS, b" " * 31 * MILLION),
    "too few": ("/kvmig/v1/instances", {"count": 0}),
    "odd flags": ("/kvmig/v1/instances", {"flags": "\0 '"}),
    "odd name": ("/kvmig/v1/instances/%00%0a%ff/drain", {}),
    "no time": ("/kvmig/v1/instances/i0/drain", b'{"deadline_s": 1e999}'),
}


async def test_what_is_sent_to_hurt_is_a_short_4xx_and_others_lose_nothing(
    served: Toys,
) -> None:
    headers = {"content-type": "application/json"}
    answers: dict[str, tuple[int, int]] = {}
    async with httpx.AsyncClient(
        base_url=served.url, headers=headers, timeout=SERVER_PATIENCE_S, verify=False
    ) as http:
        with served.held(20):
            stream = await start_stream(served, count_from(17, 60), 20)
            for name, (path, body) in BODIES.items():
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = await http.post(path, content=content)
                assert answer.json()["error"]["code"] == answer.status_code
                answers[name] = (answer.status_code, len(answer.content))
        metrics = (await http.get("/metrics")).text
    bad = {name: told for name, told in answers.items() if told[0] // 100 != 4 or told[1] > 1000}
    assert not bad
    assert answers["large"][0] == 413
    too_much = sum(status == 413 for status, _ in answers.values())
    assert f'kvmig_http_refused_total{{status="413"}} {float(too_much)}' in metrics
    counted(await stream.end(), 17)


async def test_every_route_keeps_to_its_schema_whatever_is_sent(served: Toys) -> None:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{served.url}/openapi.json",
        f"--max-time={FUZZ_S}", "--request-timeout=60", "--no-color", "--seed=1",
        "--continue-on-failure", "--generation-database=:memory:",
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(FUZZ_S + SERVER_PATIENCE_S):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    chosen = re.search(rb"Selected: (\d+)/(\d+)", said)
    assert chosen is not None
    assert chosen[1] == chosen[2]
    # It may have ended instances, or emptied them.
    async with (
        asyncio.timeout(SERVER_PATIENCE_S),
        httpx.AsyncClient(base_url=f"{served.url}/kvmig/v1", verify=False) as http,
    ):
        while True:
            rows = (await http.get("/instances")).json()["data"]
            for row in rows:
                if row["state"] == "draining":
                    await http.delete(f"/instances/{row['id']}/drain")
            if all(row["state"] == "serving" for row in rows):
                break
            await asyncio.sleep(0.2)


KINDS = (
    "messages that are none", "tools", "names for the template", "prompts",
    "logit_bias that is none",
    "vllm_xargs, names", "unknown field", "schema, deep", "choice", "deep JSON",
    "input that is none", "numbers as input",
)  # fmt: skip


async def test_vllms_front_end_refuses_what_is_too_much_and_its_streams_go_on(
    two_instances: Served,
) -> None:
    headers = {"content-type": "application/json"}
    answers: dict[tuple[str, str], int] = {}
    stream = await start_stream(two_instances, count_from(17, 1500), 20)
    async with httpx.AsyncClient(
        base_url=two_instances.url, headers=headers, timeout=SERVER_PATIENCE_S, verify=False
    ) as http:
        for call in hostile_calls(two_instances.model, 8192, KINDS.__contains__):
            answer = await http.post(call.path, content=call.body)
            answers[call.kind, call.size] = answer.status_code
            assert "message" in answer.text or answer.status_code == 200
        metrics = (await http.get("/metrics")).text
    assert {kind for kind, _ in answers} == set(KINDS)
    assert {status for (_, size), status in answers.items() if size == "huge"} == {413}
    assert {status for (_, size), status in answers.items() if size == "fits"} <= {200, 400}
    assert "kvmig_http_loop_stall_seconds_count" in metrics
    counted(await stream.end(), 17)
