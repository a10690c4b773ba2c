"""Which calls the door lets through, and which model a path means."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmig.accounts.keys import KeyGrant
from kvmig.asgi.route_table import CLIENT_ROUTES, ClientRoute
from kvmig.proxy.calls import asked
from kvmig.proxy.messages import KeyUpdates, ModelRoute
from tests.support.proxy_site import Deployment, Got, Site, key, site, streams
from tests.support.waiting import until

CLOSED = [
    ("POST", "/inference/v1/abort_requests"), ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/load_lora_adapter"), ("POST", "/sleep"), ("POST", "/collective_rpc"),
    ("GET", "/v1/nothing"), ("GET", "/openapi.json"), ("GET", "/version"), ("GET", "/docs"),
    ("POST", "/v1/messages/../sleep"),
    ("GET", "/v1/responses/resp_1/input_items"), ("DELETE", "/models/count/v1/nothing"),
    ("POST", "/v1/realtime"), ("GET", "/server_info"),
]  # fmt: skip
"""Of vLLM's and others that are not for clients."""


def error_of(answer: Any) -> Any:
    return answer.json()["error"]


async def send(door: Site, method: str, path: str, body: Any = None, **more: Any) -> Any:
    async with door.client(more.pop("given", None)) as client:
        return await client.request(method, path, json=body, **more)


@pytest.mark.parametrize("before", ["", "/models/count"])
@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_a_route_that_is_not_in_the_table_is_404_and_starts_nothing(
    door: Site, method: str, path: str, before: str
) -> None:
    door.tell(ModelRoute(name="count", state="cold"))
    answer = await send(door, method, before + path, {"model": "count"})
    assert door.wanted == []
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"


@pytest.mark.parametrize("unit", ["/v1/models/", "/v1/models", "/models/", "/"])
def test_a_path_is_read_in_time_in_proportion_to_its_length(unit: str) -> None:
    path = f"/models/{unit * (60_000 // len(unit))}/v1/models/a\n"
    began = time.process_time()
    found = asked("GET", path)
    assert time.process_time() - began < 0.5
    assert found.path == "/v1/models"


@pytest.mark.parametrize("before", ["", "/models/count"])
async def test_another_method_of_a_route_is_405_with_those_that_there_are(
    door: Site, before: str
) -> None:
    door.tell(ModelRoute(name="count", state="cold"))
    answer = await send(door, "GET", f"{before}/v1/chat/completions")
    listing = await send(door, "POST", f"{before}/v1/models", {"model": "count"})
    assert door.wanted == []
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    path = f"{before}/v1/chat/completions"
    assert error_of(answer)["message"] == f"'{path}' takes POST, not GET"
    assert (listing.status_code, listing.headers["allow"]) == (405, "GET")


def _form(route: ClientRoute) -> dict[str, Any]:
    if route.model == "form":
        return {"files": {"file": ("a.wav", b"RIFF"), "model": (None, "count")}}
    return {"json": {"model": "count"}}


ASKED = [one for one in CLIENT_ROUTES if one.model != "answer"]


@pytest.mark.parametrize("route", ASKED, ids=lambda one: one.path)
async def test_a_route_of_the_table_reaches_a_running_model_however_its_path_is_written(
    door: Site, route: ClientRoute
) -> None:
    async with door.deployment() as there, door.client() as client:
        plain = await client.request(route.method, route.path, **_form(route))
        named = await client.request(route.method, f"/models/count{route.path}", **_form(route))
        ended = await client.request(route.method, f"{route.path}/", **_form(route))
    assert [one.status_code for one in (plain, named, ended)] == [200] * 3
    assert [one.line for one in there.got] == [f"{route.method} {route.path} HTTP/1.1"] * 3


@pytest.mark.parametrize("route", [one for one in ASKED if not one.works], ids=lambda one: one.path)
async def test_what_no_engine_works_for_starts_no_model(door: Site, route: ClientRoute) -> None:
    door.tell(ModelRoute(name="count", state="cold"))
    answer = await send(door, "POST", route.path, {"model": "count", "prompt": "hi"})
    demands = door.door.demands()
    assert door.wanted == []
    assert answer.status_code == 503
    assert "a request that its engine works for starts it" in error_of(answer)["message"]
    assert demands == ()


async def test_what_no_engine_works_for_keeps_no_model_up(door: Site) -> None:
    async with door.deployment():
        answer = await send(door, "POST", "/tokenize", {"model": "count", "prompt": "hi"})
        demands = door.door.demands()
    assert answer.status_code == 200
    assert demands == ()


# -- what a path names


async def test_a_path_that_names_an_adapter_means_it_whatever_the_body_says(door: Site) -> None:
    bodies: list[Any] = [{}, {"model": "count"}, {"model": None}, {"model": "one"}]
    async with door.deployment(adapters=("one", "two")) as there:
        for body in bodies:
            await send(door, "POST", "/models/one/v1/chat/completions", body)
    assert [one.fields["model"] for one in there.got] == ["one"] * len(bodies)


async def test_a_path_that_names_an_adapter_means_it_for_a_form_too(door: Site) -> None:
    file = {"file": ("a.wav", b"RIFF")}
    forms: list[Any] = [{"files": file}, {"files": file, "data": {"model": "count"}}]
    async with door.deployment(adapters=("one",)) as there, door.client() as client:
        for form in forms:
            await client.post("/models/one/v1/audio/transcriptions", **form)
    assert [one.body.count(b'name="model"\r\n\r\none\r\n') for one in there.got] == [1, 1]
    assert [one.body.count(b'name="model"') for one in there.got] == [1, 1]


async def test_a_key_for_an_adapter_gets_the_adapter_and_nothing_of_its_model(door: Site) -> None:
    given, _ = door.add_key(models=("one",))
    async with door.deployment(adapters=("one", "two")) as there:
        path = "v1/chat/completions"
        allowed = await send(door, "POST", f"/models/one/{path}", {"model": "count"}, given=given)
        denied = await send(door, "POST", f"/models/count/{path}", {"model": "one"}, given=given)
    assert (allowed.status_code, denied.status_code) == (200, 404)
    assert [one.fields["model"] for one in there.got] == ["one"]


async def test_the_list_of_a_path_that_names_a_model_is_that_model(door: Site) -> None:
    given, _ = door.add_key(models=("one",))
    async with door.deployment(adapters=("one", "two")) as there:
        asks = {
            path: await send(door, "GET", path, given=given)
            for path in (
                "/models/one/v1/models", "/models/one/v1/models/one",
                "/models/one/v1/models/two", "/models/count/v1/models",
            )
        }  # fmt: skip
    every, itself, other, foreign = asks.values()
    assert [row["id"] for row in every.json()["data"]] == ["one"]
    assert itself.json()["id"] == "one"
    assert (other.status_code, foreign.status_code) == (404, 404)
    assert there.got == []


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data; boundary=a; boundary=b",
        "multipart/form-data; boundary=b; boundary=a",
        "multipart/form-data", 'multipart/form-data; boundary="a\\"b"',
        "multipart/form-data; boundary*=utf-8''a; boundary=b", "application/json",
        "multipart/form-data; charset=utf-16; boundary=b", "multipart/form-data; boundary=",
    ],
)  # fmt: skip
async def test_a_form_is_refused_unless_its_type_has_exactly_one_boundary(
    door: Site, kind: str
) -> None:
    one, two = (
        b'--%s\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n--%s--\r\n' % words
        for words in ((b"a", b"count", b"a"), (b"b", b"secret", b"b"))
    )
    async with door.deployment() as there:
        door.ready("secret")
        path = "/v1/audio/transcriptions"
        answer = await door.ask(one + two, path, headers={"content-type": kind})
    assert answer.status_code == 400
    assert error_of(answer)["message"].startswith("content-type is ")
    assert there.got == []


@pytest.mark.parametrize(
    "part",
    [
        b'Content-Disposition: form-data; name="model"; filename="x"\r\n\r\ncount',
        b'Content-Disposition: form-data; name="x"\r\n'
        b'Content-Disposition: form-data; name="model"\r\n\r\ncount',
        b'Content-Disposition: form-data\r\n\r\ncount',
        b'Content-Disposition: form-data; name="model"\r\n\r\n\xff\xfe',
    ],
)  # fmt: skip
async def test_a_form_whose_model_can_be_read_in_two_ways_is_refused(
    door: Site, part: bytes
) -> None:
    body = b"--b\r\n" + part + b"\r\n--b--\r\n"
    async with door.deployment() as there:
        path, kind = "/v1/audio/transcriptions", "multipart/form-data; boundary=b"
        answer = await door.ask(body, path, headers={"content-type": kind})
    assert answer.status_code == 400
    assert there.got == []


async def test_a_form_of_ten_thousand_parts_is_refused_at_once(door: Site) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n'
    async with door.deployment() as there:
        path, kind = "/v1/audio/transcriptions", "multipart/form-data; boundary=b"
        answer = await door.ask(part * 10_000 + b"--b--\r\n", path, headers={"content-type": kind})
    assert error_of(answer)["message"] == "the form has more than 1000 parts"
    assert there.got == []


@pytest.mark.parametrize("name", ["org/Qwen3-0.6B", "Org/Name-1.5B:tag", "a/b/C"])
async def test_a_path_may_name_a_model_whose_name_has_slashes_and_capitals(
    door: Site, tmp_path: Path, name: str
) -> None:
    there = Deployment(f"{tmp_path}/socket")
    await there.open()
    door.tell(ModelRoute(name=name, state="ready", socket=there.path))
    for path in ("/v1/chat/completions", "/v1/rerank", "/inference/v1/generate", "/tokenize"):
        await send(door, "POST", f"/models/{name}{path}", {"model": "other"})
    rows = (await send(door, "GET", f"/models/{name}/v1/models")).json()["data"]
    row = (await send(door, "GET", f"/v1/models/{name}")).json()
    other = await send(door, "POST", f"/models/{name.lower()}/v1/completions", {})
    await there.close()
    assert [one.fields["model"] for one in there.got] == [name] * 4
    assert [one["id"] for one in (*rows, row)] == [name] * 2
    assert other.status_code == 404


# -- calls that name a model only by an answer's id


async def answers_with_its_id(got: Got) -> None:
    named = got.fields["request_id"] if got.body else got.line.split()[1]
    got.json({"id": named})


async def respond(door: Site, given: str, **fields: Any) -> Any:
    return await send(
        door, "POST", "/v1/responses", {"model": "count", "input": "hi", **fields}, given=given
    )


def of_user(user: str, **terms: Any) -> tuple[str, KeyGrant]:
    given, grant = key(**terms)
    return given, msgspec.structs.replace(grant, user_id=user)


@pytest.mark.parametrize(
    ("method", "after"), [("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel")]
)
async def test_an_answer_is_found_by_its_id_alone_and_only_by_its_user(
    tmp_path: Path, method: str, after: str
) -> None:
    mine, grant = of_user("u1")
    same, second = of_user("u1")
    other, foreign = of_user("u2")
    narrow, third = of_user("u1", models=("other",))
    async with (
        site(tmp_path, grant, second, foreign, third) as door,
        door.deployment(answers_with_its_id) as there,
    ):
        door.ready("other")
        made = (await respond(door, mine, request_id="resp_chosen")).json()["id"]
        path = f"/v1/responses/{made}{after}"
        asks = [await send(door, method, path, given=one) for one in (mine, same, other, narrow)]
        wrong = await send(door, method, f"/models/other{path}", given=mine)
        right = await send(door, method, f"/models/count{path}", given=mine)
    assert made != "resp_chosen"
    assert [one.status_code for one in asks] == [200, 200, 404, 404]
    assert (wrong.status_code, right.status_code) == (404, 200)
    assert error_of(asks[2])["code"] == "response_not_found"
    assert [one.line.split()[1] for one in there.got[1:]] == [path] * 3


async def test_an_answer_is_found_at_any_proxy(tmp_path: Path) -> None:
    given, grant = of_user("u1")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with site(tmp_path / "a", grant) as one, site(tmp_path / "b", grant) as two:
        async with one.deployment(answers_with_its_id):
            made = (await respond(one, given)).json()["id"]
        async with two.deployment(answers_with_its_id) as there:
            answer = await send(two, "GET", f"/v1/responses/{made}", given=given)
    assert answer.status_code == 200
    assert len(there.got) == 1


async def test_a_response_goes_on_only_from_one_of_its_user_and_model(tmp_path: Path) -> None:
    mine, grant = of_user("u1")
    other, foreign = of_user("u2")
    async with (
        site(tmp_path, grant, foreign) as door,
        door.deployment(answers_with_its_id) as there,
    ):
        made = (await respond(door, mine)).json()["id"]
        asks = [
            await respond(door, given, previous_response_id=previous)
            for given, previous in ((mine, made), (other, made), (mine, "resp_made_up"))
        ]
    assert [one.status_code for one in asks] == [200, 404, 404]
    assert error_of(asks[1])["code"] == "previous_response_not_found"
    assert len(there.got) == 2


async def test_an_answer_of_a_model_that_is_cold_is_not_there_and_starts_nothing(
    tmp_path: Path,
) -> None:
    given, grant = of_user("u1")
    async with site(tmp_path, grant) as door:
        async with door.deployment(answers_with_its_id):
            made = (await respond(door, given)).json()["id"]
        door.tell(ModelRoute(name="count", state="cold"))
        answer = await send(door, "GET", f"/v1/responses/{made}", given=given)
        assert door.wanted == []
    assert answer.status_code == 404


async def test_an_answers_stream_ends_with_the_right_of_its_key(tmp_path: Path) -> None:
    given, grant = of_user("u1")

    async def answers(got: Got) -> None:
        if got.body:
            await answers_with_its_id(got)
        else:
            await streams(got)

    async with site(tmp_path, grant) as door, door.deployment(answers) as there:
        made = (await respond(door, given)).json()["id"]
        path = f"/v1/responses/{made}?stream=true"
        running = asyncio.create_task(send(door, "GET", path, given=given))
        await until(lambda: len(there.got) == 2)
        other = msgspec.structs.replace(grant, models=("other",))
        door.door.apply(KeyUpdates(version=9, changed=(other,)))
        async with asyncio.timeout(2):
            said = (await running).text
    assert "no model 'count'" in said


def test_the_documentation_has_every_route_of_the_table_and_no_other() -> None:
    page = Path(__file__).parents[2] / "docs" / "proxy.md"
    rows = re.findall(r"^\| (GET|POST|PUT|DELETE) \| `(.+?)` \| the (\w+) \| (.+?) \|$",
                      page.read_text(), re.MULTILINE)  # fmt: skip
    words = {"tokens": "prompt and output", "prompt": "prompt", "nothing": "nothing"}
    places = {"body": "body", "form": "form", "answer": "id"}
    assert sorted(rows) == sorted(
        (one.method, one.path, places[one.model], words[one.charge]) for one in CLIENT_ROUTES
    )
