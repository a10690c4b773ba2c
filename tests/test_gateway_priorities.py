"""The priority of a call at the door: classes by name and number, everything else is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvmig.gateway.http import PRIORITY, checked_body
from kvmig.ground.priorities import PriorityClass, with_normal
from tests.http_states import behind_middleware

CLASSES = with_normal([PriorityClass("high", -10)])
ALLOWED = "must be high (-10) or normal (0)"


async def echo(request: Request) -> JSONResponse:
    """What the application sees."""
    body = await request.body()
    length = request.headers.get("content-length")
    assert length is None or int(length) == len(body)
    return JSONResponse({"body": body.decode(), "header": request.headers.get(PRIORITY)})


def application() -> Starlette:
    app = Starlette(routes=[Route("/", echo, methods=["GET", "POST"])])
    behind_middleware(app, priorities=CLASSES)
    return app


async def post(content: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(app=application())
    headers = {"content-type": "application/json", **(headers or {})}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
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


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[1]", b'{"prompt": 1', b'{"priority" : 0 , "a": 1}', b'{"a":1}']
)
async def test_what_needs_no_change_goes_through_as_it_came(body: bytes) -> None:
    assert (await post(body)).json()["body"] == body.decode()


async def test_other_calls_are_left_alone() -> None:
    form = await post(b'{"priority": 7}', {"content-type": "multipart/form-data"})
    assert form.json()["body"] == '{"priority": 7}'
    transport = httpx.ASGITransport(app=application())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
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
