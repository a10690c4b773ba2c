"""The proxy's door: who gets in, where a call goes, what goes on of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmig.accounts.keys import AccountLimits, ModelQuota
from kvmig.proxy.messages import (
    AliasTable,
    KeyUpdates,
    ModelCard,
    ModelRoute,
    QuotaLeft,
    SpentLimits,
)
from tests.support.proxy_site import Got, Site, key, site
from tests.support.waiting import until


def error_of(answer: Any) -> Any:
    return answer.json()["error"]


# -- keys


@pytest.mark.parametrize("given", ["-", "kv-aaaaaaaa-" + "x" * 43, "sk-other"])
async def test_a_call_without_a_good_key_gets_401_as_openai_says_it(door: Site, given: str) -> None:
    async with door.deployment():
        answer = await door.ask(given=given)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert error_of(answer)["code"] == "invalid_api_key"


async def test_who_looks_with_a_browser_is_told_what_this_is(door: Site) -> None:
    async with door.client() as client:
        answer = await client.get("/", headers={"authorization": ""})
    assert answer.status_code == 200
    assert answer.json()["what"] == "the entry point of a kvmig fleet: an OpenAI API, for programs"


async def test_a_key_may_come_as_anthropics_clients_send_it(door: Site) -> None:
    async with door.deployment(), door.client("-") as client:
        client.headers.pop("authorization")
        headers = {"x-api-key": door.key}
        answer = await client.post("/v1/messages", json={"model": "count"}, headers=headers)
    assert answer.status_code == 200


async def test_an_error_of_messages_is_in_anthropics_form(door: Site) -> None:
    answer = await door.ask(path="/v1/messages", given="no")
    assert answer.status_code == 401
    assert answer.json() == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "no such API key"},
    }


async def test_an_expired_key_and_one_of_another_network_are_told_apart(door: Site) -> None:
    old, _ = door.add_key(expires=1.0)
    far, _ = door.add_key(cidrs=("10.0.0.0/8",))
    async with door.deployment():
        answers = [await door.ask(given=given) for given in (old, far)]
    assert [answer.status_code for answer in answers] == [401, 403]


async def test_a_revoked_key_opens_nothing_from_the_next_call_on(door: Site) -> None:
    given, grant = door.add_key()
    async with door.deployment():
        before = await door.ask(given=given)
        door.door.apply(KeyUpdates(version=9, removed=(grant.prefix,)))
        after = await door.ask(given=given)
    assert (before.status_code, after.status_code) == (200, 401)


async def test_a_model_that_is_not_for_the_key_is_as_one_that_is_not_there(door: Site) -> None:
    given, _ = door.add_key(models=("count",))
    door.ready("secret")
    real = await door.ask({"model": "secret"}, given=given)
    made_up = await door.ask({"model": "nonsense"}, given=given)
    assert real.status_code == made_up.status_code == 404
    assert error_of(real)["code"] == error_of(made_up)["code"] == "model_not_found"
    assert error_of(real)["message"].replace("secret", "nonsense") == error_of(made_up)["message"]


async def test_an_unknown_name_gets_the_near_ones_that_the_key_may_use(door: Site) -> None:
    given, _ = door.add_key(models=("count", "secret-1b"))
    for name in ("count", "counter", "secret-1b"):
        door.ready(name)
    near = await door.ask({"model": "coumt"}, given=given)
    hidden = await door.ask({"model": "counter"}, given=given)
    other = await door.ask({"model": "mistral"}, given=given)
    assert error_of(near)["message"] == "no model 'coumt'; near it: count"
    assert error_of(hidden)["message"] == "no model 'counter'; near it: count"
    assert error_of(other)["message"] == "no model 'mistral'"


# -- limits


async def test_the_request_after_a_minutes_last_is_told_when_to_come_again(tmp_path: Path) -> None:
    given, grant = key(rpm=2)
    async with site(tmp_path, grant, clock=lambda: 100.0) as door, door.deployment():
        answers = [await door.ask(given=given) for _ in range(3)]

    assert [one.status_code for one in answers] == [200, 200, 429]
    assert [one.headers["x-ratelimit-remaining-requests"] for one in answers] == ["1", "0", "0"]
    assert answers[2].headers["x-ratelimit-limit-requests"] == "2"
    assert int(answers[2].headers["retry-after"]) == 30
    assert error_of(answers[2])["code"] == "rate_limit_exceeded"
    assert "may send 2 requests per minute, try again in" in error_of(answers[2])["message"]


MEDIA = [
    ("/v1/audio/speech", {"input": "Good morning", "voice": "a"}),
    ("/v1/images/generations", {"prompt": "a cat"}),
]


@pytest.mark.parametrize(("path", "fields"), MEDIA)
async def test_calls_of_speech_and_images_at_once_are_within_a_minutes_requests(
    tmp_path: Path, path: str, fields: dict[str, str]
) -> None:
    given, grant = key(rpm=3)
    body = {"model": "count", **fields}
    async with site(tmp_path, grant, clock=lambda: 100.0) as door, door.deployment() as deployment:
        calls = (door.ask(body, path=path, given=given) for _ in range(8))
        answers = await asyncio.gather(*calls)
    assert sorted(one.status_code for one in answers) == [200] * 3 + [429] * 5
    assert len(deployment.got) == 3
    late = next(one for one in answers if one.status_code == 429)
    assert error_of(late)["code"] == "rate_limit_exceeded"
    assert int(late.headers["retry-after"]) == 20


async def test_each_image_of_a_call_is_a_request_of_its_limit(tmp_path: Path) -> None:
    given, grant = key(rpm=3)
    async with site(tmp_path, grant, clock=lambda: 100.0) as door, door.deployment():

        async def draw(images: int) -> Any:
            body = {"model": "count", "prompt": "a cat", "n": images}
            return await door.ask(body, path="/v1/images/generations", given=given)

        many = await draw(4)
        answers = [await draw(images) for images in (2, 2, 1, 1)]
    assert (many.status_code, error_of(many)["code"]) == (400, "too_many_sequences")
    assert [one.status_code for one in answers] == [200, 429, 200, 429]


async def test_who_is_over_a_limit_hears_so_before_the_body_has_come(door: Site) -> None:
    given, _ = door.add_key(rpm=1)
    async with door.deployment():
        await door.ask(given=given)
        door.key = given
        reader, writer = await door.connect()
        call = door.call({"model": "count", "prompt": "x" * 9000}, "expect: 100-continue")
        writer.write(call[:-9000])
        async with asyncio.timeout(1):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"x-ratelimit-remaining-requests: 0" in head


async def test_an_error_of_messages_has_anthropics_form_where_the_path_names_the_model(
    door: Site,
) -> None:
    answer = await door.ask(path="/models/org/Name/v1/messages", given="no")
    assert answer.status_code == 401
    assert answer.json()["type"] == "error"


async def test_a_limit_that_is_raised_lets_the_next_request_in(door: Site) -> None:
    given, grant = door.add_key(rpm=1)
    async with door.deployment():
        statuses = []
        for rpm in (1, 1, 5):
            changed = msgspec.structs.replace(grant, rpm=rpm)
            door.door.apply(KeyUpdates(version=9, changed=(changed,)))
            statuses.append((await door.ask(given=given)).status_code)
    assert statuses == [200, 429, 200]


async def test_a_call_counts_as_all_the_sequences_that_it_asks_for(tmp_path: Path) -> None:
    given, grant = key(parallel=3, rpm=7)
    call: dict[str, Any] = {"model": "count", "prompt": ["a", "b"]}
    async with site(tmp_path, grant, clock=lambda: 100.0) as door, door.deployment() as there:
        too_many = await door.ask({**call, "n": 2}, "/v1/completions", given=given)
        left = [
            (await door.ask(call, "/v1/completions", given=given)).headers[
                "x-ratelimit-remaining-requests"
            ]
            for _ in range(3)
        ]
        late = await door.ask(call, "/v1/completions", given=given)
    assert too_many.status_code == 400
    assert error_of(too_many)["code"] == "too_many_sequences"
    assert "the call asks for 4 (n times its prompts)" in error_of(too_many)["message"]
    assert left == ["5", "3", "1"]
    assert late.status_code == 429
    assert len(there.got) == 3


async def test_a_clock_that_jumps_by_an_hour_brings_no_new_minute(tmp_path: Path) -> None:
    given, grant = key(rpm=1)
    jumps_s, statuses = [0.0], []
    async with (
        site(tmp_path, grant, wall=lambda: 1e9 + jumps_s[-1]) as door,
        door.deployment(),
        door.client(given) as client,
    ):
        for jump_s in (0, 3600, -3600):
            jumps_s.append(jump_s)
            answer = await client.post("/v1/completions", json={"model": "count"})
            statuses.append(answer.status_code)
    assert statuses == [200, 429, 429]


async def test_requests_at_once_are_counted_until_they_are_over(door: Site) -> None:
    given, _ = door.add_key(parallel=1)
    door.tell(ModelRoute(name="count", state="cold"))
    held = asyncio.create_task(door.ask(given=given))
    await until(lambda: door.door.hold.waiting("count"))
    refused = await door.ask(given=given)
    async with door.deployment():
        first = await held
        after = await door.ask(given=given)
    assert [refused.status_code, first.status_code, after.status_code] == [429, 200, 200]
    assert (
        "may have 1 requests at once, try again when one has ended" in error_of(refused)["message"]
    )


async def test_a_key_that_owes_tokens_waits_and_another_does_not(tmp_path: Path) -> None:
    given, grant = key(tpm=60)
    async with site(tmp_path, grant, clock=lambda: 100.0) as door, door.deployment():
        door.door.apply(SpentLimits(owed={grant.key_id: 90.0}))
        refused, other = await door.ask(given=given), await door.ask()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) == 30
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert other.status_code == 200


async def test_an_answer_says_what_is_left_of_a_quota(tmp_path: Path) -> None:
    given, grant = key(quota=1000, tpm=600, quotas={"count": ModelQuota(500, "total")})
    word = "x-ratelimit-{}-tokens"
    told = []
    async with site(tmp_path, grant, wall=lambda: 1000.0) as door, door.deployment():
        for tokens, of_model in ((900, 500), (300, 500), (300, 7)):
            left = {
                grant.key_id: QuotaLeft(tokens, 1060.0),
                f"{grant.key_id} count": QuotaLeft(of_model, None),
            }
            door.door.apply(SpentLimits(owed={grant.key_id: 0.0}, left=left))
            headers = (await door.ask(given=given)).headers
            told.append([headers.get(word.format(one)) for one in ("limit", "remaining", "reset")])
    assert told[1:] == [["1000", "300", "60.000s"], ["500", "7", None]]
    assert told[0][:2] == ["500", "500"]


@pytest.mark.parametrize(
    ("left", "status"),
    [(QuotaLeft(0, None), 429), (QuotaLeft(0, 4e9), 429), (QuotaLeft(0, 1.0), 200),
     (QuotaLeft(1, None), 200)],
)  # fmt: skip
async def test_a_quota_that_is_used_up_is_said_as_openai_does_until_it_begins_anew(
    door: Site, left: QuotaLeft, status: int
) -> None:
    given, grant = door.add_key(quota=1000, period="day")
    async with door.deployment():
        door.door.apply(SpentLimits(left={grant.key_id: left}))
        answer = await door.ask(given=given)
    assert answer.status_code == status
    if status == 429:
        assert (error_of(answer)["type"], error_of(answer)["code"]) == ("insufficient_quota",) * 2
        assert "quota of 1000 tokens a day is used up" in error_of(answer)["message"]


async def test_a_users_limit_counts_the_requests_of_all_keys(tmp_path: Path) -> None:
    keys = [key(AccountLimits(rpm=1)) for _ in range(2)]
    async with site(tmp_path, *(grant for _, grant in keys)) as door, door.deployment():
        answers = [await door.ask(given=given) for given, _ in keys]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert error_of(answers[1])["message"].startswith("the user ann may send 1 requests per minute")
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_users_quota_is_passed_on_and_refused_when_it_is_used_up(door: Site) -> None:
    given, grant = door.add_key(AccountLimits(quota=1000, period="day"))
    async with door.deployment() as there:
        before = await door.ask(given=given)
        door.door.apply(SpentLimits(left={grant.user_id: QuotaLeft(0, None)}))
        after = await door.ask(given=given)
    assert (before.status_code, there.got[0].headers["x-kvmig-quota"]) == (200, "1")
    assert after.status_code == 429
    assert error_of(after)["message"] == "the user ann's quota of 1000 tokens a day is used up"


@pytest.mark.parametrize("named", ["count", "other-name"])
async def test_a_models_quota_is_refused_when_it_is_used_up_whatever_name_is_given(
    door: Site, named: str
) -> None:
    given, grant = door.add_key(quotas={"count": ModelQuota(500, "day")})
    async with door.deployment(), door.client(given) as client:
        door.door.apply(AliasTable(version=9, aliases={"other-name": {"count": 1}}))
        door.door.apply(SpentLimits(left={f"{grant.origin} count": QuotaLeft(0, None)}))
        answer = await client.post("/v1/completions", json={"model": named})
    assert answer.status_code == 429
    assert error_of(answer)["message"] == (
        "the API key's quota of 500 tokens a day for model count is used up"
    )


async def test_a_models_quota_is_nothing_to_calls_to_other_models(door: Site) -> None:
    given, grant = door.add_key(quotas={"secret": ModelQuota(500, "day")})
    async with door.deployment() as there, door.client(given) as client:
        door.door.apply(SpentLimits(left={f"{grant.origin} secret": QuotaLeft(0, None)}))
        answer = await client.post("/v1/completions", json={"model": "count"})
    assert answer.status_code == 200
    assert "x-kvmig-quota" not in there.got[0].headers


# -- the model


async def test_a_body_that_names_the_deployments_own_name_goes_on_byte_by_byte(door: Site) -> None:
    body = b' {"model" : "count",  "prompt":"\\u00e9", "seed":1.50 } '
    async with door.deployment() as there:
        await door.ask(body)
    assert there.got[0].body == body


async def test_an_alias_becomes_the_deployments_own_name_and_nothing_else_changes(
    door: Site,
) -> None:
    async with door.deployment(served="weights") as there:
        door.door.apply(AliasTable(version=9, aliases={"gpt": {"count": 1}}))
        await door.ask({"model": "gpt", "prompt": "hi", "seed": 1.5})
    assert there.got[0].fields == {"model": "weights", "prompt": "hi", "seed": 1.5}


async def test_of_two_models_in_a_body_the_last_counts_for_the_key_and_for_the_engine(
    door: Site,
) -> None:
    given, _ = door.add_key(models=("count",))
    twice = b'{"model":"count","mod\\u0065l":"secret"}'
    async with door.deployment() as there:
        door.ready("secret")
        denied = await door.ask(twice, given=given)
        await door.ask(b'{"model":"secret","model":"count"}', given=given)
    assert denied.status_code == 404
    assert [one.fields["model"] for one in there.got] == ["count"]


async def test_an_adapter_goes_to_its_models_deployment_under_its_own_name(door: Site) -> None:
    async with door.deployment(adapters=("poet",)) as there:
        await door.ask({"model": "count:poet"})
        await door.ask({"model": "poet"})
    assert [one.fields["model"] for one in there.got] == ["poet", "poet"]


async def test_a_path_may_name_the_model(door: Site) -> None:
    async with door.deployment() as there, door.client() as client:
        await client.post("/models/count/v1/completions?a=b", json={"prompt": "hi"})
    assert there.got[0].line == "POST /v1/completions?a=b HTTP/1.1"


@pytest.mark.parametrize(
    "path",
    [
        "/models/count/kvmig/v1/instances", "/models/count/v1/../kvmig/v1/instances", "/sleep",
        "/v1/load_lora_adapter", "/models/count/metrics/", "//kvmig/v1/instances",
        "/models/count/v1%2f..%2fx",
    ],
)  # fmt: skip
async def test_a_deployments_own_paths_are_not_for_clients(door: Site, path: str) -> None:
    async with door.deployment() as there:
        reader, writer = await door.connect(door.call({"model": "count"}, path=path))
        status = await reader.readline()
        writer.close()
    assert b" 404 " in status
    assert there.got == []


async def test_a_multipart_form_names_its_model_in_whatever_part(door: Site) -> None:
    file = {"file": ("a.wav", b"RIFF\r\n--x\r\n" * 50_000)}
    late: Any = {"file": ("a.wav", b"RIFF"), "model": (None, "count")}
    async with door.deployment(served="w") as there, door.client() as client:
        form = {"language": "en", "model": "count"}
        await client.post("/v1/audio/transcriptions", data=form, files=file)
        await client.post("/v1/audio/transcriptions", files=late)
    assert [b'name="model"\r\n\r\nw\r\n' in one.body for one in there.got] == [True, True]


async def test_a_form_with_two_models_is_refused(door: Site) -> None:
    parts = [("model", (None, "count")), ("model", (None, "other"))]
    async with door.deployment() as there, door.client() as client:
        answer = await client.post("/v1/audio/transcriptions", files=parts)
    assert answer.status_code == 400
    assert error_of(answer)["message"] == "the form has model twice"
    assert there.got == []


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{}", "model is missing: the body names it, or the path as in /models/NAME/v1/..."),
        (b'{"model": 3}', "model is 3, must be a model's name"),
        (b"[1]", "the body is no JSON object: Expected `object`, got `array`"),
        (b"[" * 100_000, "the body is no JSON object: Expected `object`, got `array`"),
    ],
)
async def test_a_body_without_a_model_to_read_is_refused_by_name(
    door: Site, body: bytes, sentence: str
) -> None:
    answer = await door.ask(body)
    assert answer.status_code == 400
    assert error_of(answer)["message"] == sentence


async def test_a_model_name_of_ten_megabytes_is_not_found_and_not_repeated(door: Site) -> None:
    async with door.deployment():
        answer = await door.ask({"model": "x" * 10_000_000})
    assert answer.status_code == 404
    assert len(answer.content) < 1000


async def test_a_compressed_body_is_refused(door: Site) -> None:
    answer = await door.ask(b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


async def test_a_body_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path, max_body=2000) as door, door.deployment():
        answer = await door.ask({"model": "count", "prompt": "x" * 3000})
    assert answer.status_code == 413


# -- what goes on


async def test_headers_of_kvmigs_are_the_proxys_own(door: Site) -> None:
    sent = {
        "x-kvmig-account": "me",
        "x-kvmig-tenant": "you",
        "x-kvmig-place": "w1",
        "X-Request-Id": "r1",
        "traceparent": "t",
    }
    async with door.deployment() as there:
        answer = await door.ask(headers=sent)
    got = there.got[0].headers
    assert got["x-kvmig-account"] == door.key.split("-")[1]
    assert got["x-kvmig-tenant"] == "u1"
    assert "x-kvmig-place" not in got
    assert "authorization" not in got
    assert (got["x-request-id"], answer.headers["x-request-id"]) == ("r1", "r1")
    assert got["traceparent"] == "t"


async def test_pipelined_calls_are_answered_in_their_order(door: Site) -> None:
    async def slow_first(got: Got) -> None:
        await asyncio.sleep(0.1 if got.fields["n"] == 0 else 0)
        got.json({"n": got.fields["n"]})

    async with door.deployment(slow_first):
        reader, writer = await door.connect()
        writer.writelines(door.call({"model": "count", "n": n}) for n in range(3))
        found = []
        for _ in range(3):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            found.append(json.loads(await reader.readexactly(size))["n"])
        writer.close()
    assert found == [0, 1, 2]


async def test_a_head_request_ends_with_its_head(door: Site) -> None:
    async def sized(got: Got) -> None:
        got.head("content-length: 5")

    async with door.deployment(sized, "api"), door.client() as client:
        for path in ("/kvmig/v2/models", "/v1/models", "/kvmig/v2/keys"):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")


async def test_an_answer_without_a_length_ends_with_the_connection(door: Site) -> None:
    async def until_closed(got: Got) -> None:
        got.head("content-type: text/plain")
        got.writer.write(b"all of it")

    async with door.deployment(until_closed):
        answer = await door.ask()
    assert answer.content == b"all of it"
    assert answer.headers["connection"] == "close"


async def test_a_deployments_own_error_goes_to_the_client_as_it_is(door: Site) -> None:
    async def refuses(got: Got) -> None:
        got.json({"error": {"message": "max_tokens"}}, status="400 Bad Request")

    async with door.deployment(refuses):
        answer = await door.ask()
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "max_tokens"}})


# -- the door's own answers


async def test_models_are_those_that_the_key_may_use_cold_ones_too(door: Site) -> None:
    given, _ = door.add_key(models=("count", "cold", "gone", "alias"))
    async with door.client(given) as client:
        door.tell(
            ModelRoute(name="count", state="ready"),
            ModelRoute(name="cold", state="cold", start_s=4.5),
            ModelRoute(name="gone", state="off"), ModelRoute(name="secret", state="ready"),
        )  # fmt: skip
        door.door.apply(AliasTable(version=9, aliases={"alias": {"cold": 1}}))
        rows = (await client.get("/v1/models")).json()["data"]
        one = await client.get("/v1/models/cold")
        other = await client.get("/v1/models/secret")
    assert [row["id"] for row in rows] == ["count", "cold", "alias"]
    assert one.json()["kvmig"] == {"state": "cold", "start_s": 4.5}
    assert other.status_code == 404


async def test_the_list_says_of_a_model_what_its_deployment_said_also_when_it_is_cold(
    door: Site,
) -> None:
    card = ModelCard(created=1_700_000_000, owned_by="vllm", max_model_len=4096)
    async with door.client() as client:
        door.tell(ModelRoute(name="count", state="cold", card=card, adapters=("poet",)))
        rows = (await client.get("/v1/models")).json()["data"]
    known = {"object": "model", "created": 1_700_000_000, "owned_by": "vllm", "max_model_len": 4096}
    state = {"kvmig": {"state": "cold", "start_s": None}}
    assert rows == [
        {"id": "count", **known, **state}, {"id": "poet", **known, "parent": "count", **state},
    ]  # fmt: skip


async def test_metrics_are_for_admins(door: Site) -> None:
    given, _ = door.add_key()
    async with door.deployment():
        await door.ask()
        async with door.client() as admin, door.client(given) as other:
            text = (await admin.get("/metrics")).text
            denied = await other.get("/metrics")
    assert 'kvmig_proxy_requests_total{model="count",proxy="0",status="200"} 1.0' in text
    assert denied.status_code == 403


async def test_the_servers_paths_are_relayed_to_it_with_the_clients_address(door: Site) -> None:
    headers = {"x-forwarded-for": "10.1.1.1", "forwarded": "for=10.1.1.1"}
    async with door.deployment(name="api") as server, door.client() as client:
        answer = await client.get("/kvmig/v2/models?x=1", headers=headers)
    got = server.got[0]
    assert answer.json() == {"ok": True}
    assert got.line == "GET /kvmig/v2/models?x=1 HTTP/1.1"
    assert got.headers["x-forwarded-for"] == "127.0.0.1"
    assert "forwarded" not in got.headers
    assert got.headers["authorization"] == f"Bearer {door.key}"


async def test_the_servers_paths_take_no_body_without_a_key(door: Site) -> None:
    async with door.deployment(name="api") as server, door.client("-") as client:
        answer = await client.post("/kvmig/v2/models", content=b"x" * 1000)
    assert answer.status_code == 401
    assert server.got == []


async def test_without_the_server_its_paths_say_so(door: Site) -> None:
    async with door.client() as client:
        answer = await client.get("/kvmig/v2/models")
    assert answer.status_code == 503
    assert error_of(answer)["message"] == "the fleet's server is not there, try again"


async def test_a_door_that_stops_lives_and_is_not_ready(door: Site) -> None:
    async with door.client("-") as client:
        before = await client.get("/health")
        door.door.close()
        after, live = await client.get("/health"), await client.get("/live")
    assert (before.status_code, after.status_code, live.status_code) == (200, 503, 200)


async def test_a_message_that_is_too_large_is_refused_in_its_apis_form(tmp_path: Path) -> None:
    async with site(tmp_path, max_body=2000) as door:
        door.ready()
        answer = await door.ask(b'{"model": "count"}' + b" " * 9000, path="/v1/messages")
    assert answer.status_code == 413
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "request_too_large")
