"""A deployment that runs a command: calls, counts, and what dies, with toy servers over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from kvmig.accounts.allowances import TokenGrant, TokenRequest
from tests.support.command_site import CommandSite, FollowedStream, text_of
from tests.support.fleets import ended
from tests.support.waiting import until

pytestmark = pytest.mark.server

COMPLETIONS = "/v1/completions"
SECRETS = (
    "HF_TOKEN", "HF_ENDPOINT", "AWS_SECRET_ACCESS_KEY", "OTEL_EXPORTER_OTLP_HEADERS",
    "KVMIG_SECRET", "HTTPS_PROXY", "NVIDIA_API_KEY",
)  # fmt: skip


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandSite]:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*SECRETS, "OMP_NUM_THREADS", "AWS_PROFILE"):
            patch.setenv(name, "1")
        with CommandSite(
            folder, instances=2, hang_timeout_s=3.0, pass_environment=("AWS_PROFILE", "GONE")
        ) as made:
            yield made


@pytest.fixture
def site(shared_site: CommandSite) -> Iterator[CommandSite]:
    """Two servers that serve; no call runs."""
    yield shared_site
    shared_site.script.hold(None)
    for name in ("mute", "deaf"):
        shared_site.script.set(name, None)


def ask(tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": "one two three", "max_tokens": tokens, **more}


def sockets_in(folder: Path) -> list[Path]:
    return [one for one in folder.iterdir() if one.is_socket()]


async def record_of(site: CommandSite, call_id: str) -> Any:
    """The last record of a call, once it has ended."""
    found: list[Any] = []

    def there() -> bool:
        found[:] = [one for one in site.records() if one.call_id == call_id and one.ended]
        return bool(found)

    await until(there, pause_s=0.05)
    return found[-1]


async def test_an_answer_and_its_usage_are_the_servers(site: CommandSite) -> None:
    async with site.client() as http:
        answer = await http.post(COMPLETIONS, json=ask(), headers={"x-request-id": "whole"})
    assert answer.json()["choices"][0]["text"] == text_of(5)
    record = await record_of(site, "whole")
    assert (record.prompt, record.output, record.status, record.account) == (3, 5, "finished", "k")


def test_a_server_gets_no_secret_of_the_fleet_that_its_specification_does_not_name(
    site: CommandSite,
) -> None:
    for row in site.rows():
        found = psutil.Process(row["pid"]).environ()
        assert not found.keys() & {*SECRETS, "GONE"}
        assert (found["AWS_PROFILE"], found["OMP_NUM_THREADS"]) == ("1", "1")
        assert found["PATH"] == os.environ["PATH"]
    assert "pass_environment has GONE, which `kvmig up` doesn't have" in site.log.read_text()


async def test_a_stream_is_counted_by_a_usage_that_its_client_does_not_see(
    site: CommandSite,
) -> None:
    async with site.client() as http:
        http.headers["x-request-id"] = "hidden"
        stream = await FollowedStream().follow(http, COMPLETIONS, ask(7))
    assert (stream.text, stream.usage, stream.done) == (text_of(7), [], True)
    assert all(one["choices"] for one in stream.events)
    record = await record_of(site, "hidden")
    assert (record.prompt, record.output, record.status) == (3, 7, "finished")
    assert record.ttft_ms > 0


async def test_a_client_that_asks_for_the_usage_of_its_stream_gets_it(site: CommandSite) -> None:
    body = ask(7, stream_options={"include_usage": True})
    async with site.client() as http:
        stream = await FollowedStream().follow(http, COMPLETIONS, body)
    assert [one["completion_tokens"] for one in stream.usage] == [7]


async def test_a_server_that_says_nothing_of_usage_is_counted_by_the_rule(
    site: CommandSite,
) -> None:
    site.script.set("mute")
    async with site.client() as http:
        await http.post(COMPLETIONS, json=ask(8), headers={"x-request-id": "mute"})
        http.headers["x-request-id"] = "mute stream"
        await FollowedStream().follow(http, COMPLETIONS, ask(8))
    whole, stream = await record_of(site, "mute"), await record_of(site, "mute stream")
    assert whole.output == stream.output == 8 * 5 / 4  # five bytes a token, four count as one
    assert whole.prompt > 0


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/embeddings", {"input": ["a b", "c"]}, "application/json"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}, "application/json"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "application/json"),
    ],
)
async def test_prompts_without_answers_are_counted(
    site: CommandSite, path: str, body: dict[str, Any], kind: str
) -> None:
    async with site.client() as http:
        headers = {"x-request-id": f"prompts {path}"}
        answer = await http.post(path, json={"model": "toy", **body}, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    record = await record_of(site, f"prompts {path}")
    assert (record.prompt, record.output) == (3, 0)


async def test_an_error_is_the_servers_in_the_apis_form_and_costs_nothing(
    site: CommandSite,
) -> None:
    async with site.client() as http:
        body = {**ask(), "model": "another"}
        answer = await http.post(COMPLETIONS, json=body, headers={"x-request-id": "error"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    record = await record_of(site, "error")
    assert (record.prompt, record.output) == (0, 0)


async def test_calls_go_to_the_server_with_the_fewest(site: CommandSite) -> None:
    site.script.hold(2)
    async with site.client() as http:
        streams = [FollowedStream() for _ in range(8)]
        tasks = [asyncio.create_task(one.follow(http, COMPLETIONS, ask(9))) for one in streams]
        await until(lambda: all(len(one.text) >= 10 for one in streams))
        assert [one["running"] for one in site.rows()] == [4, 4]
        site.script.hold(None)
        await asyncio.gather(*tasks)
    assert {one.text for one in streams} == {text_of(9)}


async def test_a_server_that_dies_ends_its_own_streams_only_and_starts_again(
    site: CommandSite,
) -> None:
    site.script.hold(2)
    async with site.client() as http:
        streams = [FollowedStream() for _ in range(6)]
        tasks = [asyncio.create_task(one.follow(http, COMPLETIONS, ask(9))) for one in streams]
        await until(lambda: all(len(one.text) >= 10 for one in streams))
        killed = site.rows()[0]["pid"]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: sum(one.done() for one in tasks) == 3)
        site.script.hold(None)
        await asyncio.gather(*tasks)
    ends = Counter((one.text, one.error) for one in streams)
    broken = "the server ended while it answered"
    assert ends == {(text_of(9), ""): 3, (text_of(2), broken): 3}
    assert all(one.done for one in streams)
    await until(lambda: site.rows()[0]["pid"] != killed, pause_s=0.02)
    await site.until_states("serving", "serving")


async def test_a_call_without_an_answer_yet_goes_to_another_server_and_counts_once(
    site: CommandSite,
) -> None:
    site.script.hold(0)
    async with site.client() as http:
        asking = asyncio.create_task(
            http.post(COMPLETIONS, json=ask(6), headers={"x-request-id": "again"})
        )
        await until(lambda: any(one["running"] for one in site.rows()), pause_s=0.02)
        killed = next(one["pid"] for one in site.rows() if one["running"])
        os.kill(killed, signal.SIGKILL)
        await until(
            lambda: asking.done() or any(one["running"] and one["pid"] for one in site.rows()),
            pause_s=0.02,
        )
        assert not asking.done(), (await asking).text
        site.script.hold(None)
        answer = await asking
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text_of(6)
    record = await record_of(site, "again")
    assert (record.prompt, record.output, record.reruns, record.status) == (3, 6, 1, "finished")
    assert sum(one.call_id == "again" for one in site.records()) == 1
    await until(lambda: killed not in [one["pid"] for one in site.rows()], pause_s=0.02)
    await site.until_states("serving", "serving")


async def test_a_client_that_leaves_is_left_by_the_server_too(site: CommandSite) -> None:
    site.script.hold(2)
    async with site.client() as http:
        http.headers["x-request-id"] = "left"
        stream = FollowedStream()
        task = asyncio.create_task(stream.follow(http, COMPLETIONS, ask(9)))
        await until(lambda: len(stream.text) >= 10)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not any(one["running"] for one in site.rows()), pause_s=0.02)
    record = await record_of(site, "left")
    assert (record.status, record.output) == ("cut", 3)  # ten bytes, by the rule


@pytest.mark.parametrize(("limit", "most"), [(3, 3), (2000, 2000)])
async def test_a_client_that_leaves_before_a_whole_answer_pays_for_the_servers_time(
    site: CommandSite, limit: int, most: int
) -> None:
    site.script.hold(1)
    async with site.client() as http:
        http.headers["x-request-id"] = f"whole-{limit}"
        task = asyncio.create_task(http.post(COMPLETIONS, json=ask(limit)))
        await until(lambda: any(one["running"] for one in site.rows()), pause_s=0.02)
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not any(one["running"] for one in site.rows()), pause_s=0.02)
    record = await record_of(site, f"whole-{limit}")
    assert record.status == "cut"
    assert 3 <= record.output <= most


@pytest.mark.long
async def test_a_server_that_answers_nothing_is_started_again(site: CommandSite) -> None:
    before = [one["pid"] for one in site.rows()]
    site.script.set("deaf")
    await site.until_states("starting", "starting")
    assert "nothing came from it for 3 s: it was ended" in site.rows()[0]["detail"]
    site.script.set("deaf", None)
    await site.until_states("serving", "serving")
    assert not set(before) & {one["pid"] for one in site.rows()}


@pytest.mark.long
async def test_an_instance_drains_by_waiting_and_leaves(site: CommandSite) -> None:
    assert site.ask("POST", "/kvmig/v1/instances", {"count": 1}).status_code == 201
    await site.until_states("serving", "serving", "serving")
    last = site.rows()[2]["id"]
    site.script.hold(2)
    async with site.client() as http:
        streams = [FollowedStream() for _ in range(6)]
        tasks = [asyncio.create_task(one.follow(http, COMPLETIONS, ask(9))) for one in streams]
        await until(lambda: all(len(one.text) >= 10 for one in streams))
        assert site.ask("DELETE", f"/kvmig/v1/instances/{last}").status_code == 202
        await site.until_states("serving", "serving", "draining")
        late = asyncio.create_task(http.post(COMPLETIONS, json=ask(1)))
        assert (await late).status_code == 200
        assert [one["running"] for one in site.rows()] == [2, 2, 2]
        site.script.hold(None)
        await asyncio.gather(*tasks)
    await site.until_states("serving", "serving")
    assert [one.text for one in streams] == [text_of(9)] * 6


async def test_orders_that_another_engine_cannot_carry_out_are_refused_by_name(
    site: CommandSite,
) -> None:
    body = {"request_id": "a"}
    moved = site.ask("POST", "/kvmig/v1/migrations", body)
    assert moved.status_code == 501
    assert "requests can't be moved" in moved.json()["error"]["message"]
    assert site.ask("POST", "/kvmig/v1/park").status_code == 501
    assert site.ask("DELETE", "/kvmig/v1/instances/i99").status_code == 404
    assert site.ask("POST", "/kvmig/v1/instances", {"count": 99}).status_code == 409
    assert site.ask("POST", "/kvmig/v1/instances", {"count": 0}).status_code == 400
    assert site.ask("POST", "/kvmig/v1/instances", {"cuont": 1}).status_code == 400
    assert site.ask("GET", "/kvmig/v1/instances", token="6.1").status_code == 200
    late = site.ask("POST", "/kvmig/v1/instances", {"count": 1}, token="5.7")
    assert late.status_code == 409
    assert "is of an earlier server of the fleet" in late.json()["error"]["message"]
    assert site.ask("POST", "/kvmig/v1/instances", {"count": 1}, token="x").status_code == 400
    assert [one["unmovable"] for one in site.rows()] == [
        "another engine's requests can't be moved: they end where they run"
    ] * 2
    assert site.ask("GET", "/v1/models").json()["data"][0]["id"] == "toy"


async def test_the_last_server_stays_and_the_end_waits_for_its_streams(tmp_path: Path) -> None:
    with CommandSite(tmp_path, listens="--uds={socket}") as site:
        (row,) = site.rows()
        assert site.ask("DELETE", "/kvmig/v1/instances/i0").status_code == 409
        site.script.hold(2)
        async with site.client() as http:
            stream = FollowedStream()
            task = asyncio.create_task(stream.follow(http, COMPLETIONS, ask(9)))
            await until(lambda: len(stream.text) >= 10)
            ending = asyncio.create_task(asyncio.to_thread(site.end))
            await asyncio.sleep(0.3)
            site.script.hold(None)
            await task
        assert await ending == 0
        assert (stream.text, stream.error) == (text_of(9), "")
        assert ended(row["pid"])
        assert sockets_in(tmp_path) == []
    (record,) = site.records()
    assert (record.prompt, record.output, record.status) == (3, 9, "finished")


@pytest.mark.long
async def test_a_stream_that_outlasts_the_end_gets_an_error_and_counts_what_it_had(
    tmp_path: Path,
) -> None:
    with CommandSite(tmp_path, shutdown_timeout_s=0.3) as site:
        site.script.hold(2)
        async with site.client() as http:
            stream = FollowedStream()
            task = asyncio.create_task(stream.follow(http, COMPLETIONS, ask(9)))
            await until(lambda: len(stream.text) >= 10)
            assert await asyncio.to_thread(site.end) == 0
            await task
        assert stream.error == "the deployment stops"
    (record,) = site.records()
    assert (record.output, record.status) == (3, "cut")


@pytest.mark.long
async def test_a_deployment_that_is_killed_leaves_no_server_and_its_counts(tmp_path: Path) -> None:
    with CommandSite(tmp_path) as site:
        (row,) = site.rows()
        site.script.hold(2)
        async with site.client() as http:
            stream = FollowedStream()
            task = asyncio.create_task(stream.follow(http, COMPLETIONS, ask(9)))
            await until(lambda: any(one.output for one in site.records()), pause_s=0.05)
            assert site.process is not None
            site.process.kill()
            await asyncio.wait([task])
        await until(lambda: ended(row["pid"]))
        site.process.wait()
    assert [(one.output, one.status) for one in site.records()] == [(3, "running")]


@pytest.mark.long
async def test_a_server_that_is_never_ready_fails_the_deployment_with_a_sentence(
    tmp_path: Path,
) -> None:
    site = CommandSite(tmp_path, start_timeout_s=1.0)
    site.script.set("deaf")
    site.start()
    await until(lambda: site.over)
    assert site.end() == 1
    assert site.log.read_text().splitlines()[-1] == (
        "kvmig: instance i0: /health was not answered with 200 within 1 s; its log says more"
    )
    for process in psutil.process_iter(["cmdline"]):
        assert str(tmp_path) not in " ".join(process.info["cmdline"] or [])


async def test_a_call_with_a_quota_gets_what_is_granted_at_once(tmp_path: Path) -> None:
    asked: list[TokenRequest] = []
    writers: list[asyncio.StreamWriter] = []

    async def grant(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while line := await reader.readline():
            ask_ = msgspec.json.decode(line, type=TokenRequest)
            asked.append(ask_)
            tokens = ask_.least + 3 if ask_.model == "toy" else 0
            given = TokenGrant(ask_.number, tokens if len(asked) != 2 else 0, "used up")
            writer.write(msgspec.json.encode(given) + b"\n")
        writer.close()

    with CommandSite(tmp_path) as site:
        server = await asyncio.start_unix_server(grant, site.launch.quotas)
        async with server, site.client(**{"x-kvmig-quota": "1"}) as http:
            answer = await http.post(COMPLETIONS, json=ask(500))
            refused = await http.post(COMPLETIONS, json=ask(500))
            chat = {"model": "toy", "messages": [], "max_tokens": 0, "max_completion_tokens": 500}
            await http.post("/v1/chat/completions", json=chat)
            for one in writers:
                one.close()
                await one.wait_closed()
        (bodies,) = site.script.asked().values()
        assert bodies[-1]["max_completion_tokens"] == 3
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert refused.status_code == 429
        assert "used up" in refused.json()["error"]["message"]
        assert (asked[0].want - asked[0].least, asked[0].key) == (499, "k")
