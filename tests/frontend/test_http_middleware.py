"""The middleware: a call's id, who is let in, and its priority."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmig.asgi.call import HttpCall, accepted, current_call, current_call_id
from kvmig.asgi.priority import PRIORITY, checked_body
from kvmig.core.priorities import PriorityClass, with_normal
from kvmig.frontend.probes import probe_routes
from kvmig.frontend.requests import priority_of_call
from tests.support.http_states import behind_middleware


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def echo_id(request: Request) -> PlainTextResponse:
    """What the application sees."""
    headers = request.headers.getlist("x-request-id")
    return PlainTextResponse(f"{headers} {current_call_id()}", headers={"x-request-id": "mine"})


async def get(headers: dict[str, str]) -> httpx.Response:
    app = Starlette(routes=[Route("/", echo_id)])
    behind_middleware(app)
    async with client_of(app) as client:
        return await client.get("/", headers=headers)


async def test_a_clients_id_goes_through() -> None:
    answer = await get({"X-Request-Id": "the client's own"})
    assert answer.headers.get_list("x-request-id") == ["the client's own"]
    assert answer.text == "[\"the client's own\"] the client's own"


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": "x" * 129}, {"X-Request-Id": ""}])
async def test_a_missing_or_bad_id_is_made_anew(headers: dict[str, str]) -> None:
    answer = await get(headers)
    (made,) = answer.headers.get_list("x-request-id")
    assert len(made) == 32
    assert answer.text == f"['{made}'] {made}"
    assert current_call.get() is None


@given(st.text())
def test_what_is_accepted_is_printable_ascii_of_at_most_128(given: str) -> None:
    good = accepted(given)
    assert 1 <= len(good) <= 128
    assert good.isascii()
    assert good.isprintable()
    if (
        1 <= len(given) <= 128
        and given.isascii()
        and given.isprintable()
        and given == given.strip()
    ):
        assert good == given


# -- while nobody could be served


async def knock(path: str, closed: bool = False, vacant: bool = False) -> httpx.Response:
    app = FastAPI()
    behind_middleware(app, closed=closed, vacant=lambda: vacant)

    @app.post("/{path:path}")
    async def answer() -> str:
        return "in"

    async with client_of(app) as client:
        return await client.post(path)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("vacant", [False, True])
@pytest.mark.parametrize("closed", [False, True])
async def test_health_is_ready_exactly_when_calls_are_taken(
    closed: bool, vacant: bool, broken: bool
) -> None:
    app = FastAPI()
    state = behind_middleware(app, closed=closed, vacant=lambda: vacant)
    app.router.routes.extend(probe_routes(state, lambda: broken))

    @app.post("/v1/completions")
    async def answer() -> Response:
        return Response(status_code=500 if broken else 200)

    async with client_of(app) as client:
        call = await client.post("/v1/completions")
        ready = [await client.get(path) for path in ("/health", "/ping")]
        head = await client.head("/health")
        live = await client.get("/live")

    expected = 200 if call.status_code == 200 else 503
    assert [one.status_code for one in (*ready, head)] == [expected] * 3
    if call.status_code == 503:
        assert ready[0].json() == call.json()
    assert live.status_code == 200


async def test_without_an_instance_new_requests_are_told_to_come_again() -> None:
    answer = await knock("/v1/completions", vacant=True)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "5"
    assert answer.json()["error"]["message"] == "no instance is there to run it"


@pytest.mark.parametrize("path", ["/pause", "/sleep", "/collective_rpc", "/reset_prefix_cache"])
async def test_a_call_to_the_engines_of_a_server_that_has_none_is_refused_by_name(
    path: str,
) -> None:
    app = FastAPI()
    behind_middleware(app, without_engine=lambda: True)

    @app.post("/{path:path}")
    async def answer() -> str:
        return "in"

    async with client_of(app) as client:
        refused = await client.post(path)
        works = await client.post("/tokenize")

    assert refused.status_code == 503
    said = f"no instance of this server is connected to run {path} on, POST /kvmig/v1/instances"
    assert said in refused.json()["error"]["message"]
    assert works.json() == "in"  # its clients' requests may run at other servers


async def test_without_an_instance_an_operator_is_let_in() -> None:
    answer = await knock("/kvmig/v1/instances", vacant=True)
    assert answer.json() == "in"


@pytest.mark.parametrize("path", ["/v1/completions", "/kvmig/v1/instances"])
async def test_a_server_that_stops_lets_nobody_in(path: str) -> None:
    answer = await knock(path, closed=True)
    assert answer.status_code == 503
    assert "stopping" in answer.json()["error"]["message"]


async def test_the_gate_is_open_otherwise() -> None:
    assert (await knock("/v1/completions")).json() == "in"


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/completions//?x=1"])
async def test_a_path_with_a_slash_at_its_end_is_the_same_path(path: str) -> None:
    app = FastAPI(redirect_slashes=False)
    behind_middleware(app)

    @app.post("/v1/completions")
    async def answer(request: Request) -> str:
        return request.url.path

    async with client_of(app) as client:
        found = await client.post(path, json={})
    assert (found.status_code, found.json()) == (200, "/v1/completions")


# -- the priority of a call: a class's name or number, everything else is refused


CLASSES = with_normal([PriorityClass("high", -10)])
ALLOWED = "must be high (-10) or normal (0)"


async def session_of(headers: dict[str, str], **fields: str) -> int | str | None:
    """What stands for a call's session; the sentence of the refusal."""

    async def answer(request: Request) -> JSONResponse:
        call = current_call.get()
        return JSONResponse({"session": None if call is None else call.session})

    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    state = behind_middleware(app)
    state.session_secret = b"of this front end"
    async with client_of(app) as client:
        body = {"prompt": "a", **fields}
        got = (await client.post("/v1/completions", json=body, headers=headers)).json()
    found: int | str | None = got["session"] if "session" in got else got["error"]["message"]
    return found


async def test_a_call_names_its_session_in_a_header_or_in_its_body() -> None:
    known = await session_of({"x-session-id": "s"})
    assert isinstance(known, int)
    assert await session_of({"x-smg-routing-key": "s"}) == known
    assert await session_of({}, prompt_cache_key="s", user="other") == known
    assert await session_of({}, user="s") == known
    assert await session_of({}) is None


async def test_a_session_counts_for_the_key_of_its_call() -> None:
    payers = []

    async def answer(request: Request) -> JSONResponse:
        call = current_call.get()
        payers.append("" if call is None else call.payer)
        return JSONResponse({})

    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    behind_middleware(app).keyed = True
    async with client_of(app) as client:
        for key in ("one", "one", "other"):
            headers = {"authorization": f"Bearer {key}", "x-session-id": "s"}
            await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert payers[0] == payers[1] != payers[2]
    assert all(payers)


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "bEarer"])
def test_a_key_is_one_account_however_its_scheme_is_spelt(scheme: str) -> None:
    state = behind_middleware(Starlette())
    state.keyed = True
    usual, other = (MutableHeaders({"authorization": f"{one} a key"}) for one in ("Bearer", scheme))
    assert state.payer(HttpCall(), other) == state.payer(HttpCall(), usual) != ""


async def test_a_session_of_too_many_characters_is_refused() -> None:
    said = await session_of({"x-session-id": "s" * 257})
    assert said == "x-session-id has 257 characters, allowed are 256"


async def echo(request: Request) -> JSONResponse:
    """What the application sees."""
    body = await request.body()
    length = request.headers.get("content-length")
    assert length is None or int(length) == len(body)
    header, runs_as = request.headers.get(PRIORITY), priority_of_call(5)
    return JSONResponse({"body": body.decode(), "header": header, "runs_as": runs_as})


def application() -> Starlette:
    app = Starlette(routes=[Route("/", echo, methods=["GET", "POST"])])
    behind_middleware(app, priorities=CLASSES)
    return app


async def post(content: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    headers = {"content-type": "application/json", **(headers or {})}
    async with client_of(application()) as client:
        return await client.post("/", content=content, headers=headers)


async def test_a_class_is_named_by_number_or_by_name() -> None:
    for value in (-10, "high"):
        answer = await post(json.dumps({"prompt": "é", "priority": value, "n": 1.50}))
        assert json.loads(answer.json()["body"]) == {"prompt": "é", "priority": -10, "n": 1.5}


@pytest.mark.parametrize("value", [b"1e999", b'"\xff"'], ids=["huge", "no UTF-8"])
async def test_a_value_that_nobody_can_read_is_refused_like_others(value: bytes) -> None:
    answer = await post(b'{"priority": ' + value + b"}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(ALLOWED)


async def test_json_by_any_spelling_of_its_type_is_looked_at() -> None:
    answer = await post(b'{"priority": 7}', {"content-type": "Application/JSON"})
    assert answer.status_code == 400


async def test_a_body_that_comes_in_parts_is_put_together() -> None:
    async def parts() -> Any:
        for part in (b'{"prior', b'ity": "hi', b'gh"}'):
            yield part

    answer = await post(parts())
    assert json.loads(answer.json()["body"]) == {"priority": -10}


@pytest.mark.parametrize("value", [1, -1, "low", "0", 0.0, True, None, [0], {}])
async def test_another_priority_is_a_400_with_one_sentence(value: Any) -> None:
    answer = await post(json.dumps({"priority": value}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("priority", 400)
    assert error["message"] == f"priority is {value!r}, {ALLOWED}"


async def test_the_header_is_checked_and_named_in_the_same_way() -> None:
    answer = await post(b"{}", {PRIORITY: "high"})
    assert answer.json()["header"] == "-10"
    answer = await post(b"{}", {PRIORITY: "7"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == PRIORITY
    assert answer.json()["error"]["message"] == f"{PRIORITY} is 7, {ALLOWED}"


async def test_a_request_is_of_the_headers_class_whatever_its_route_reads() -> None:
    by_header = await post(b'{"priority": 0}', {PRIORITY: "high"})
    by_none = await post(b"{}")
    assert (by_header.json()["runs_as"], by_none.json()["runs_as"]) == (-10, 5)


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[1]", b'{"prompt": 1', b'{"priority" : 0 , "a": 1}', b'{"a":1}']
)
async def test_what_needs_no_change_goes_through_as_it_came(body: bytes) -> None:
    assert (await post(body)).json()["body"] == body.decode()


async def test_other_calls_are_left_alone() -> None:
    form = await post(b'{"priority": 7}', {"content-type": "multipart/form-data"})
    assert form.json()["body"] == '{"priority": 7}'
    async with client_of(application()) as client:
        assert (await client.get("/", headers={PRIORITY: "7"})).status_code == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values))
def test_nothing_but_the_priority_changes(fields: dict[str, Any]) -> None:
    body = json.dumps({**fields, "priority": "high"}).encode()
    assert json.loads(checked_body(body, CLASSES)[0]) == {**fields, "priority": -10}


@pytest.mark.parametrize(("version", "status"), [("1.0", 403), ("1.1", 200), ("2", 200)])
async def test_the_admin_api_without_a_key_is_closed_to_http_1_0(version: str, status: int) -> None:
    path = "/kvmig/v1/instances"
    app = Starlette(routes=[Route(path, echo_id)])
    behind_middleware(app)

    async def in_version(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "http_version": version}, receive, send)

    async with client_of(in_version) as client:
        assert (await client.get(path)).status_code == status
