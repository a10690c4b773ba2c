"""Calls to models that are not there yet: wanted once, held within bounds, answered in order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from kvmig.core.priorities import NORMAL, PriorityClass
from kvmig.proxy import activator
from kvmig.proxy.messages import KeyUpdates, ModelRoute
from tests.support.proxy_site import EVENT, Deployment, Got, Site, says_ok, site
from tests.support.waiting import until

HIGH, LOW = PriorityClass("high", -1), PriorityClass("low", 9)

BEATS = {"model": "count", "stream": True}


def cold(**more: Any) -> ModelRoute:
    return ModelRoute(name="count", state="cold", **more)


async def events(got: Got) -> None:
    got.events()
    got.chunk()
    got.last()


def ask(
    door: Site, body: Any = None, path: str = "/v1/completions", **more: Any
) -> asyncio.Task[Any]:
    return asyncio.create_task(door.ask(body or {"model": "count"}, path, **more))


def held(door: Site) -> int:
    return door.door.counts.states().get("count", (0, 0))[1]


async def one_waits(door: Site) -> asyncio.Task[Any]:
    """A call, once the door holds it."""
    call = ask(door)
    await until(lambda: held(door) == 1)
    return call


async def has_heard(door: Site) -> None:
    """Until a call that waits was given its first sign of life."""
    await until(lambda: [one for one in door.door.hold.waiting("count") if one.beaten])


async def test_many_calls_to_a_cold_model_want_it_once_and_are_answered(door: Site) -> None:
    door.tell(cold(start_s=3.0))
    calls = [ask(door) for _ in range(20)]
    await until(lambda: held(door) == 20)
    assert door.wanted == ["count"]
    async with door.deployment():
        answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {200}
    assert all(int(answer.headers["x-kvmig-cold-start-ms"]) >= 0 for answer in answers)


async def test_a_warm_models_answer_names_no_cold_start(door: Site) -> None:
    async with door.deployment():
        assert "x-kvmig-cold-start-ms" not in (await door.ask()).headers


async def test_those_that_wait_go_on_by_priority_then_by_arrival(door: Site) -> None:
    door.tell(cold(priority=5, classes=(HIGH, NORMAL, LOW)))
    calls = []
    named: list[dict[str, Any]] = [{}, {"priority": 9}, {"priority": "high"}, {}]
    for number, given in enumerate(named):
        calls.append(ask(door, {"model": "count", "n": number, **given}))
        await until(lambda: held(door) == len(calls))
    async with door.deployment() as there:
        await asyncio.gather(*calls)
    assert [one.fields["n"] for one in there.got] == [2, 0, 3, 1]


@pytest.mark.parametrize(
    ("given", "headers", "value"),
    [
        ({"priority": -(10**9)}, {}, "priority is -1000000000"),
        ({"priority": "first"}, {}, "priority is 'first'"),
        ({}, {"x-vllm-priority": "-5"}, "x-vllm-priority is -5"),
    ],
)
async def test_a_class_that_the_model_does_not_have_is_refused_before_it_starts(
    door: Site, given: dict[str, Any], headers: dict[str, str], value: str
) -> None:
    door.tell(cold(classes=(HIGH, NORMAL)))
    answer = await door.ask({"model": "count", **given}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{value}, must be high (-1) or normal (0)"
    assert door.wanted == []


async def test_a_call_that_does_not_wait_hears_so_at_once(door: Site) -> None:
    door.tell(cold(start_s=7.2))
    answer = await door.ask(headers={"x-kvmig-cold": "refuse"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "8")
    assert door.wanted == []


async def test_more_than_may_wait_hear_when_to_try_again(door: Site) -> None:
    door.tell(cold(max_held=1, start_s=4.0))
    first = await one_waits(door)
    answer = await door.ask()
    async with door.deployment():
        assert (await first).status_code == 200
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")


async def test_a_waiting_client_that_leaves_is_forgotten(door: Site) -> None:
    door.tell(cold())
    _, writer = await door.connect(door.call({"model": "count"}))
    await until(lambda: held(door) == 1)
    writer.close()
    await until(lambda: held(door) == 0)
    async with door.deployment() as there:
        await door.ask()
    assert len(there.got) == 1


async def test_a_start_that_takes_too_long_is_a_503_with_its_reason(door: Site) -> None:
    door.tell(cold(start_timeout_s=0.1, why="no room: needs 5 GiB"))
    answer = await door.ask()
    sentence = "count was not ready within 0.1 s: no room: needs 5 GiB"
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == sentence
    assert "retry-after" in answer.headers


async def test_a_start_that_fails_is_a_503_in_the_childs_own_words(door: Site) -> None:
    door.tell(cold())
    call = await one_waits(door)
    door.tell(ModelRoute(name="count", state="failed", why="no such folder", retry_s=20.0))
    answer = await call
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "20")
    assert answer.json()["error"]["message"] == "no such folder"


async def test_a_model_that_is_removed_while_calls_wait_is_not_found(door: Site) -> None:
    door.tell(cold())
    call = await one_waits(door)
    door.tell(removed=("count",))
    assert (await call).status_code == 404


async def test_a_route_that_is_no_longer_ready_gets_no_new_call(door: Site) -> None:
    async with door.deployment() as there:
        await door.ask()
        door.tell(cold())
        call = await one_waits(door)
        assert len(there.got) == 1
        door.ready()
        assert (await call).status_code == 200


async def test_a_deployment_that_is_not_there_is_tried_again(door: Site, tmp_path: Path) -> None:
    door.ready()
    call = await one_waits(door)
    there = Deployment(f"{tmp_path}/count")
    await there.open()
    answer = await call
    await there.close()
    assert answer.status_code == 200


# -- signs of life


@pytest.mark.parametrize(
    ("path", "sign"),
    [
        ("/v1/chat/completions", b": starting, 0 s so far, some 4 s left\n\n"),
        ("/v1/completions", b": starting, 0 s so far, some 4 s left\n\n"),
        ("/v1/responses", b": starting, 0 s so far, some 4 s left\n\n"),
        ("/v1/messages", b'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
async def test_a_waiting_stream_hears_signs_of_life_of_its_apis_kind(
    door: Site, path: str, sign: bytes
) -> None:
    door.tell(cold(heartbeat_after_s=0.05, start_s=4.0))
    call = ask(door, BEATS, path)
    await has_heard(door)
    async with door.deployment(events):
        answer = await call
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.content == sign + EVENT


async def test_signs_of_life_come_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activator, "BEAT_S", 0.05)
    async with site(tmp_path) as door:
        door.tell(cold(heartbeat_after_s=0.05))
        async with (
            door.client() as client,
            client.stream("POST", "/v1/completions", json=BEATS) as answer,
        ):
            content, pieces = b"", answer.aiter_bytes()
            while content.count(b": starting, 0 s so far\n\n") < 3:
                content += await anext(pieces)
            async with door.deployment(events):
                content += b"".join([piece async for piece in pieces])
    assert content.replace(b": starting, 0 s so far\n\n", b"") == EVENT


async def test_a_call_without_a_stream_gets_an_honest_status_however_late(door: Site) -> None:
    door.tell(cold(heartbeat_after_s=0.02, start_timeout_s=0.2))
    answer = await door.ask({"model": "count"})
    assert answer.status_code == 503


async def test_a_failure_after_signs_of_life_is_the_streams_last_event(door: Site) -> None:
    door.tell(cold(heartbeat_after_s=0.02, start_timeout_s=0.1, why="it hangs"))
    answer = await door.ask(BEATS)
    error = answer.text.removeprefix(": cold: it hangs\n\n").removesuffix("data: [DONE]\n\n")
    told = json.loads(error.removeprefix("data: "))
    assert answer.status_code == 200
    assert told["error"]["message"] == "count was not ready within 0.1 s: it hangs"


async def test_a_refusal_of_the_deployment_after_signs_of_life_is_the_streams_last_event(
    door: Site,
) -> None:
    async def refuses(got: Got) -> None:
        got.json({"error": {"message": "max_tokens is too large"}}, status="400 Bad Request")

    door.tell(cold(heartbeat_after_s=0.02))
    call = ask(door, BEATS)
    await has_heard(door)
    async with door.deployment(refuses):
        text = (await call).text
    assert '"message":"max_tokens is too large"' in text
    assert text.endswith("data: [DONE]\n\n")


# -- responses, as OpenAI's client takes them


def response_events(text: str) -> list[bytes]:
    """As vLLM sends them."""
    response = {
        "id": "resp_1", "object": "response", "created_at": 1.0, "model": "count", "output": [],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "status": "in_progress",
    }  # fmt: skip
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{**part, "text": text}],
    }  # fmt: skip
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": response}),
        ("response.output_item.added", {"output_index": 0, "item": {**message, "content": []}}),
        ("response.content_part.added", {**place, "part": part}),
        *(("response.output_text.delta", {**place, "delta": c, "logprobs": []}) for c in text),
        ("response.output_item.done", {"output_index": 0, "item": message}),
        ("response.completed", {"response": {**response, "output": [message]}}),
    ]  # fmt: skip
    return [
        b"event: %s\ndata: %s\n\n"
        % (kind.encode(), json.dumps({**more, "sequence_number": number, "type": kind}).encode())
        for number, (kind, more) in enumerate(events)
    ]


def client_of(door: Site) -> openai.AsyncOpenAI:
    base = f"http://127.0.0.1:{door.port}/v1"
    return openai.AsyncOpenAI(base_url=base, api_key=door.key, max_retries=0)


async def test_openais_client_takes_a_response_of_a_model_that_has_started_meanwhile(
    door: Site,
) -> None:
    async def answers(got: Got) -> None:
        got.events()
        for event in response_events("12"):
            got.chunk(event)
        got.last()

    async def ask_for_it(door: Site) -> tuple[list[int], str]:
        async with (
            client_of(door) as client,
            client.responses.stream(model="count", input="1") as stream,
        ):
            numbers = [event.sequence_number async for event in stream]
            return numbers, (await stream.get_final_response()).output_text

    door.tell(cold(heartbeat_after_s=0.02))
    call = asyncio.create_task(ask_for_it(door))
    await has_heard(door)
    async with door.deployment(answers):
        numbers, text = await call
    assert (numbers, text) == (list(range(7)), "12")


async def test_openais_client_raises_what_ended_a_response_with_the_next_events_number(
    door: Site,
) -> None:
    async def dies(got: Got) -> None:
        got.events()
        for event in response_events("12")[:4]:
            for at in range(0, len(event), 50):  # however it comes apart
                got.chunk(event[at : at + 50])
                await got.writer.drain()
                await asyncio.sleep(0)

    async with door.deployment(dies):
        answer = await door.ask(BEATS, "/v1/responses")
        async with client_of(door) as client:
            stream = await client.responses.create(model="count", input="1", stream=True)
            with pytest.raises(openai.APIError, match="deployment ended while it answered"):
                async for _ in stream:
                    pass
    last = json.loads(answer.text.rstrip().rpartition("\n")[2].removeprefix("data: "))
    assert (last["type"], last["code"], last["sequence_number"]) == ("error", "deployment_ended", 4)


async def test_openais_client_raises_why_a_model_did_not_start(door: Site) -> None:
    door.tell(cold(heartbeat_after_s=0.02, start_timeout_s=0.1, why="it hangs"))
    async with client_of(door) as client:
        with pytest.raises(openai.APIError, match=r"not ready within 0\.1 s: it hangs"):
            async with client.responses.stream(model="count", input="1") as stream:
                await stream.until_done()


async def test_a_proxy_that_stops_holds_nobody(door: Site) -> None:
    door.tell(cold())
    call = await one_waits(door)
    door.door.close()
    assert (await call).status_code == 503


async def stops(got: Got) -> None:
    got.head("x-kvmig-not-taken: 1", "content-length: 0", status="503 Service Unavailable")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_a_stopping_deployment_does_not_take_goes_to_the_next_one(
    door: Site, tmp_path: Path, *, streams: bool
) -> None:
    body = {"model": "count", "stream": streams}
    async with door.deployment(stops) as old:
        call = ask(door, body)
        await until(lambda: len(old.got) >= 1)
        new = Deployment(f"{tmp_path}/next", events if streams else says_ok)
        await new.open()
        door.tell(ModelRoute(name="count", state="ready", socket=new.path))
        answer = await call
        await new.close()
    assert answer.status_code == 200
    assert old.got[0].body == new.got[0].body
    assert "x-kvmig-not-taken" not in answer.headers


async def test_a_call_that_no_deployment_takes_ends_when_a_start_would_have_been_over(
    door: Site,
) -> None:
    async with door.deployment(stops, start_timeout_s=0.6) as old:
        answer = await door.ask()
    assert answer.status_code == 503
    assert 1 <= len(old.got) <= 4, "it is asked again at intervals"


async def test_a_call_that_waits_for_the_next_one_ends_when_its_key_is_revoked(door: Site) -> None:
    given, grant = door.add_key()
    async with door.deployment(stops) as old:
        call = asyncio.create_task(door.ask(given=given))
        await until(lambda: len(old.got) >= 1)
        door.tell(ModelRoute(name="count", state="starting"))
        await until(lambda: door.door.hold.waiting("count"))
        await asyncio.sleep(0.5)  # it waits for news of the route, and no more for the next try
        door.door.apply(KeyUpdates(version=9, removed=(grant.prefix,)))
        async with asyncio.timeout(5):
            assert (await call).status_code == 401


async def test_calls_are_kept_to_be_sent_again_as_far_as_there_is_room_until_they_are_answered(
    door: Site,
) -> None:
    async def waits(got: Got) -> None:
        await answers.wait()
        await (stops if b"again" in got.body else says_ok)(got)

    answers = asyncio.Event()
    async with door.deployment(waits, start_timeout_s=0.6) as old:
        door.door.kept.most = 200  # one alone takes half
        calls = [ask(door, {"model": "count", "prompt": text}) for text in ("x" * 40, "y" * 200)]
        await until(lambda: len(old.got) == 2)
        assert 40 < door.door.kept.used <= 100, "one of them"
        answers.set()
        assert [(await one).status_code for one in calls] == [200, 200]
        assert door.door.kept.used == 0
        assert (await door.ask({"model": "count", "prompt": "again"})).status_code == 503
        assert door.door.kept.used == 0


async def test_a_large_call_that_is_not_taken_is_refused_since_nobody_keeps_it(door: Site) -> None:
    large = {"model": "count", "prompt": "x" * 100_000}
    async with door.deployment(stops) as old:
        answer = await door.ask(large)
    assert answer.status_code == 503
    assert len(old.got) == 1
    assert "x-kvmig-not-taken" not in answer.headers
