"""What engines and front ends keep of a user's calls serves nobody else, unless a model says so."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from kvmig_tools.fleet import FleetUp
from kvmig_tools.served import SMALL
from tests.e2e.test_serve_kinds import chat, picture
from tests.support import tiny_blip2

pytestmark = [pytest.mark.server, pytest.mark.long]

USERS = ("anna", "bea")
APART, SHARED = "apart", "shared"


class Users:
    """A fleet's, each with a key of her own."""

    def __init__(self, fleet: FleetUp) -> None:
        self._fleet = fleet
        self._keys = {name: [self._made(name)] for name in USERS}

    def _made(self, name: str) -> str:
        self._fleet.ask("POST", "users", {"name": name})
        return str(self._fleet.ask("POST", "keys", {"user": name}).json()["key"])

    def another_key(self, name: str) -> None:
        """Let the user call with a new key from now on."""
        self._keys[name].append(self._made(name))

    def limited_key(self, name: str, **limits: Any) -> str:
        """Another one of hers, with limits of its own."""
        made = self._fleet.ask("POST", "keys", {"user": name, **limits})
        assert made.is_success, made.text
        return str(made.json()["key"])

    def revoke(self, name: str, at: int = -1) -> None:
        """One of her keys, by default the last."""
        prefix = self._keys[name][at].split("-")[1]
        assert self._fleet.ask("DELETE", f"keys/{prefix}").is_success

    def client(self, name: str) -> httpx.AsyncClient:
        return self._fleet.client(self._keys[name][-1])

    def with_key(self, key: str) -> httpx.AsyncClient:
        return self._fleet.client(key)

    async def until_running(self, count: int) -> None:
        """The fleet has so many live requests."""
        while await self._running() != count:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.02)

    async def _running(self) -> int:
        found = 0
        for path in map(str, self._fleet.sockets()):
            transport = httpx.AsyncHTTPTransport(uds=path, verify=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://there") as client:
                try:
                    found += len((await client.get("/kvmig/v1/requests")).json()["data"])
                except httpx.ConnectError:  # of one that has ended
                    continue
        return found

    async def call(self, name: str, method: str, path: str, body: Any = None) -> httpx.Response:
        async with self._fleet.client(self._keys[name][-1]) as client:
            return await client.request(method, path, json=body)

    async def ask(self, name: str, path: str, body: Any) -> Any:
        answer = await self.call(name, "POST", path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    """Of a fleet with one model twice, whose responses are stored."""
    folder = tmp_path_factory.mktemp("isolation")
    model = folder / "blip2"
    model.mkdir()
    tiny_blip2.make(model)
    flags = [*SMALL, "--enable-prompt-tokens-details", "--max-model-len=2048"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        with FleetUp(folder) as fleet:
            for name in (APART, SHARED):
                more = {"share_prefixes": True} if name == SHARED else {}
                fleet.add({"name": name, "source": f"path:{model}", "flags": flags, **more})
            yield Users(fleet)


def letter() -> str:
    """Several blocks that nobody has sent before."""
    return secrets.token_hex(100)


def messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


APIS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[Any], int]]] = {
    "/v1/completions": (
        lambda text: {"prompt": text, "max_tokens": 1},
        lambda usage: (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0),
    ),
    "/v1/chat/completions": (
        messages,
        lambda usage: (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0),
    ),
    "/v1/responses": (
        lambda text: {"input": text, "max_output_tokens": 1},
        lambda usage: usage["input_tokens_details"]["cached_tokens"],
    ),
    "/v1/messages": (messages, lambda usage: usage.get("cache_read_input_tokens") or 0),
}
"""How each API is asked, and where its usage says how much of the prompt was cached."""


@pytest.mark.parametrize("path", APIS)
async def test_a_user_meets_cached_prompts_of_her_own_only(users: Users, path: str) -> None:
    asked, cached = APIS[path]
    text = letter()

    async def found(name: str, **more: Any) -> int:
        body = {"model": APART, **asked(text), **more}
        return cached((await users.ask(name, path, body))["usage"])

    assert await found("anna") == 0
    assert await found("bea") == 0
    assert await found("anna") > 0
    users.another_key("anna")
    assert await found("anna") > 0


async def test_the_salt_of_a_call_is_added_to_its_users(users: Users) -> None:
    asked, cached = APIS["/v1/completions"]
    body = {"model": APART, **asked(letter())}

    async def found(name: str, **salt: str) -> int:
        return cached((await users.ask(name, "/v1/completions", {**body, **salt}))["usage"])

    assert await found("anna") == 0
    assert await found("anna", cache_salt="mine") == 0
    assert await found("anna", cache_salt="mine") > 0
    assert await found("bea", cache_salt="mine") == 0


async def test_users_share_the_prompts_of_a_model_whose_specification_says_so(users: Users) -> None:
    asked, cached = APIS["/v1/completions"]
    body = {"model": SHARED, **asked(letter())}
    assert cached((await users.ask("anna", "/v1/completions", body))["usage"]) == 0
    assert cached((await users.ask("bea", "/v1/completions", body))["usage"]) > 0


async def test_a_user_gets_no_image_that_another_has_named_alike(users: Users) -> None:
    async def seen(name: str, red: int, **uuid: str) -> Any:
        """What the model computes of an image, to many digits."""
        body = chat({**picture(red), **uuid}, model=APART, logprobs=True, max_tokens=200)
        answer = await users.ask(name, "/v1/chat/completions", body)
        return [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]]

    theirs, ours = await seen("anna", 200), await seen("bea", 10)
    assert theirs != ours
    assert await seen("anna", 200, uuid="photo") == theirs
    assert await seen("bea", 10, uuid="photo") == ours


@pytest.mark.parametrize("model", [APART, SHARED])
async def test_a_stored_response_is_its_users_own(users: Users, model: str) -> None:
    secret = {"model": model, "input": "My number is 4711", "max_output_tokens": 4, "store": True}
    stored = (await users.ask("anna", "/v1/responses", secret))["id"]
    one, alone = f"/models/{model}/v1/responses/{stored}", f"/v1/responses/{stored}"
    after = {"model": model, "input": "Which?", "max_output_tokens": 4}
    after["previous_response_id"] = stored

    for method, path, body in (
        ("GET", one, None),
        ("GET", alone, None),
        ("POST", f"{alone}/cancel", None),
        ("POST", "/v1/responses", after),
    ):
        answer = await users.call("bea", method, path, body)
        assert answer.status_code in (400, 404), answer.text  # the door knows owners, too
        assert "4711" not in answer.text
    for path in (one, alone):
        assert (await users.call("anna", "GET", path)).json()["id"] == stored
    assert (await users.ask("anna", "/v1/responses", after))["previous_response_id"] == stored


async def test_a_response_in_the_background_is_cancelled_by_its_id_alone(users: Users) -> None:
    body = {"model": APART, "input": "On", "max_output_tokens": 1500, "background": True}
    begun = await users.ask("anna", "/v1/responses", {**body, "store": True})
    path = f"/v1/responses/{begun['id']}/cancel"
    assert (await users.call("bea", "POST", path)).status_code == 404
    ended = await users.call("anna", "POST", path)
    assert ended.status_code == 200, ended.text
    assert ended.json()["status"] == "cancelled"


def begin_background(name: str, **more: Any) -> dict[str, Any]:
    """A long response in the background."""
    body = {"model": name, "input": "On and on", "max_output_tokens": 1900, "ignore_eos": True}
    return {**body, "background": True, "store": True, **more}


async def status_of(client: httpx.AsyncClient, response: Any) -> str:
    return str((await client.get(f"/v1/responses/{response['id']}")).json()["status"])


async def test_a_response_in_the_background_ends_with_its_key_and_says_so(users: Users) -> None:
    begun = await users.ask("anna", "/v1/responses", begin_background(APART))
    path = f"/v1/responses/{begun['id']}"
    await users.until_running(1)
    users.revoke("anna")
    async with asyncio.timeout(1.0):
        await users.until_running(0)
    users.another_key("anna")
    ended = (await users.call("anna", "GET", path)).json()
    assert ended["status"] == "cancelled"


async def test_a_stream_in_the_background_goes_on_alone_and_its_events_end_with_its_key(
    users: Users,
) -> None:
    async with users.client("bea") as client:
        body = begin_background(APART, stream=True)
        async with client.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.aiter_lines()
            while not (line := await anext(lines)).startswith("data:"):
                pass
    response = json.loads(line[5:])["response"]["id"]
    users.another_key("bea")

    async def follow() -> list[str]:
        async with users.client("bea") as client:
            follows = client.stream("GET", f"/v1/responses/{response}?stream=true")
            async with follows as answer:
                return [one async for one in answer.aiter_lines() if one.startswith("event:")]

    following = asyncio.create_task(follow())
    await asyncio.sleep(0.3)
    await users.until_running(1)
    users.revoke("bea", at=-2)
    async with asyncio.timeout(10):
        events = await following
    assert events[-1] == "event: response.failed"
    ended = (await users.call("bea", "GET", f"/v1/responses/{response}")).json()
    assert ended["status"] == "cancelled"


async def test_a_response_in_the_background_beyond_its_quota_has_failed(users: Users) -> None:
    key = users.limited_key("anna", quota=200, period="total")
    async with users.with_key(key) as client:
        begun = (await client.post("/v1/responses", json=begin_background(APART))).json()
        async with asyncio.timeout(20):
            while (said := await status_of(client, begun)) == "queued":  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    assert said in ("failed", "incomplete")


async def test_a_response_in_the_background_takes_a_place_of_its_key(users: Users) -> None:
    key = users.limited_key("anna", parallel=1)
    async with users.with_key(key) as client:
        begun = (await client.post("/v1/responses", json=begin_background(APART))).json()
        during = await client.post("/v1/responses", json=begin_background(APART))
        await client.post(f"/v1/responses/{begun['id']}/cancel")
        await users.until_running(0)
        await asyncio.sleep(0.5)
        short = begin_background(APART, max_output_tokens=1)
        after = await client.post("/v1/responses", json=short)
    assert (during.status_code, after.status_code) == (429, 200)


async def test_the_door_says_how_long_the_models_context_is(users: Users) -> None:
    rows = (await users.call("anna", "GET", "/v1/models")).json()["data"]
    known = {row["id"]: row.get("max_model_len") for row in rows}
    assert known[APART] == 2048
    row = (await users.call("anna", "GET", f"/models/{APART}/v1/models")).json()["data"][0]
    assert row["owned_by"] == "vllm"
    assert row["created"] > 1_700_000_000
    assert "root" not in row


async def test_a_fleets_model_fetches_nothing_for_its_users(users: Users) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}
    body = {"model": APART, "messages": [{"role": "user", "content": [image]}]}
    answer = await users.call("anna", "POST", "/v1/chat/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_request")
    assert "this model fetches nothing" in error["message"]
