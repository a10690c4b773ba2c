"""A body with many wrong items is refused for the first of them, as quickly as for one."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Body, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from kvmig.frontend.openai.vllm.first_error import stop_at_first_error


class Word(BaseModel):
    kind: Literal["word"]
    letters: list[str]


class Number(BaseModel):
    kind: Literal["number"]


class Text(BaseModel):
    items: list[Word | Number]
    more: dict[str, list[int]] = {}


def app() -> FastAPI:
    made = FastAPI()

    @made.post("/text")
    async def text(body: Text) -> int:
        return len(body.items)

    @made.post("/two")
    async def two(text: Text, other: list[int] = Body()) -> int:  # noqa: B008
        return len(text.items) + len(other)

    return made


def errors(client: TestClient, path: str, body: Any) -> int:
    return len(client.post(path, json=body).json()["detail"])


def test_one_wrong_item_is_told_and_no_further_ones() -> None:
    made = app()
    client = TestClient(made)
    wrong = {"items": [{"kind": "x"}] * 1000, "more": {"a": ["x"] * 1000}}
    assert errors(client, "/text", wrong) > 3000
    stop_at_first_error(made)
    assert errors(client, "/text", wrong) < 10
    assert errors(client, "/two", {"text": wrong, "other": ["x"] * 1000}) < 10


def test_what_is_right_is_taken_as_before() -> None:
    made = app()
    stop_at_first_error(made)
    client = TestClient(made)
    right = {"items": [{"kind": "word", "letters": ["a"]}, {"kind": "number"}]}
    assert client.post("/text", json=right).json() == 2
    assert client.post("/two", json={"text": right, "other": [1]}).json() == 3
    nested = {"items": [{"kind": "word", "letters": [1] * 1000}]}
    assert errors(client, "/text", nested) < 5
