"""The ledger of a fleet of vLLM says what each answer says of its own use, on every route."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from kvmig.asgi.route_table import CLIENT_ROUTES, ClientRoute
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL
from tests.e2e.test_serve_fleet_quotas import new_key
from tests.support import tiny_judges
from tests.support.fleets import ToyFleet, kill, socket_of

pytestmark = [pytest.mark.server, pytest.mark.long]

TEXT = "Count: 0017 0018"
TEXTS = [TEXT, "Count: 0200 0201 0202", "1"]
CHAT = [{"role": "user", "content": TEXT}]
GENERATES, EMBEDS, CLASSIFIES, DECIDES = "m", "e", "c", "d"
USAGE = {"include_usage": True}


class Used(NamedTuple):
    """Tokens, as an answer or the ledger says."""

    prompt: int
    output: int


class Case(NamedTuple):
    """A body; `served`: whether the route is there for these models."""

    body: dict[str, Any]
    model: str = GENERATES
    served: bool = True


def generates(**body: Any) -> Case:
    return Case(body)


def embeds(**body: Any) -> Case:
    return Case(body, EMBEDS)


def classifies(**body: Any) -> Case:
    return Case(body, CLASSIFIES)


RECORDING = Case({}, served=False)
CHOICE = {"type": "choice", "criteria": {"up": None, "down": "it counts down"}}
PAIRS = [
    embeds(text_1=TEXT, text_2=TEXTS),
    embeds(text_1=TEXTS, text_2=TEXTS),
    classifies(text_1=TEXT, text_2=TEXTS),
]
RANKS = [embeds(query=TEXT, documents=TEXTS), classifies(query=TEXT, documents=TEXTS)]
CASES: dict[str, list[Case]] = {
    "/v1/completions": [
        generates(prompt=TEXT, max_tokens=20),
        generates(prompt=TEXT, max_tokens=20, n=3),
        generates(prompt=TEXTS, max_tokens=5),
        generates(prompt=[[1, 2, 3], [4, 5]], max_tokens=5, n=2),
        generates(prompt=TEXT, max_tokens=5, echo=True, logprobs=1),
        generates(prompt=TEXT, max_tokens=5, prompt_logprobs=2),
        generates(prompt=TEXT, max_tokens=200, stop=["9"]),
        generates(prompt=TEXT, max_tokens=20, stream=True, stream_options=USAGE),
        generates(prompt=TEXTS, max_tokens=20, n=2, stream=True,
                  stream_options={**USAGE, "continuous_usage_stats": True}),
        generates(prompt=TEXT, max_tokens=40, n=4, use_beam_search=True),
        generates(prompt=TEXTS, max_tokens=8, n=2, use_beam_search=True),
    ],
    "/v1/chat/completions": [
        generates(messages=CHAT, max_tokens=20),
        generates(messages=CHAT, max_tokens=20, n=3),
        generates(messages=CHAT, max_tokens=20, stream=True, stream_options=USAGE),
        generates(messages=CHAT, max_tokens=20, n=2, use_beam_search=True),
        generates(messages=CHAT, max_tokens=20, n=2, use_beam_search=True, stream=True,
                  stream_options=USAGE),
    ],
    "/inference/v1/generate": [
        generates(token_ids=[1, 2, 3], sampling_params={"max_tokens": 7, "n": 2}),
    ],
    "/invocations": [
        generates(prompt=TEXTS, max_tokens=7),
        generates(messages=CHAT, max_tokens=7, n=3, use_beam_search=True),
    ],
    "/cohere/v2/chat": [Case({"messages": CHAT}, served=False)],
    "/v1/systemone": [
        Case({"state": TEXT, "questions": {"a": CHOICE}}, DECIDES),
        Case({"state": TEXT, "questions": {"a": CHOICE, "b": {"type": "noul"}}}, DECIDES),
        Case({"state": TEXT, "questions": {"a": CHOICE}}, served=False),
    ],
    "/v1/chat/completions/batch": [generates(messages=[CHAT, CHAT, CHAT], max_tokens=7)],
    "/generative_scoring": [generates(query=TEXT, items=TEXTS, label_token_ids=[1, 2])],
    "/v1/responses": [
        generates(input=TEXT, max_output_tokens=20),
        generates(input=TEXT, max_output_tokens=20, stream=True),
    ],
    "/v1/messages": [
        generates(messages=CHAT, max_tokens=20),
        generates(messages=CHAT, max_tokens=20, stream=True),
    ],
    "/v1/audio/transcriptions": [RECORDING],
    "/v1/audio/translations": [RECORDING],
    "/v1/audio/speech": [Case({"input": TEXT}, served=False)],
    "/v1/images/generations": [Case({"prompt": TEXT}, served=False)],
    "/v1/images/edits": [RECORDING],
    "/v1/images/variations": [RECORDING],
    "/v1/embeddings": [embeds(input=TEXT), embeds(input=TEXTS), embeds(input=[[1, 2, 3], [4]])],
    "/v2/embed": [embeds(texts=TEXTS, embedding_types=["float"])],
    "/pooling": [embeds(input=TEXTS, task="embed")],
    "/classify": [
        classifies(input=TEXT),
        classifies(input=TEXTS),
        classifies(input=[[1, 2, 3], [4]]),
        Case({"input": TEXTS}, EMBEDS, served=False),
    ],
    "/score": PAIRS,
    "/v1/score": PAIRS,
    "/rerank": RANKS,
    "/v1/rerank": RANKS,
    "/v2/rerank": RANKS,
}  # fmt: skip
CHARGED = [one for one in CLIENT_ROUTES if one.charge != "nothing"]


class Ledger:
    """Of a fleet with a model that generates, on two instances, and some that judge texts."""

    def __init__(self, fleet: ToyFleet) -> None:
        self.fleet = fleet
        self.key = fleet.key

    async def ask(self, path: str, case: Case, key: str = "") -> tuple[str, httpx.Response]:
        """The call's id, and its answer."""
        call_id = uuid.uuid4().hex
        async with self.fleet.client(key or self.key) as http:
            body = {"model": case.model, **case.body}
            return call_id, await http.post(path, json=body, headers={"x-request-id": call_id})

    async def until_running(self, calls: int, beams: bool = False) -> None:
        """Wait until so many have tokens of their answers, and a beam search its first step."""
        seen: set[str] = set()
        path = await asyncio.to_thread(socket_of, self.fleet, GENERATES)
        transport = httpx.AsyncHTTPTransport(uds=path, verify=False)
        async with (
            asyncio.timeout(SERVER_PATIENCE_S),
            httpx.AsyncClient(transport=transport, base_url="http://x") as deployment,
        ):
            begun = 0
            while begun < calls or (beams and len(seen) < 4):
                rows = (await deployment.get("/kvmig/v1/requests")).json()["data"]
                begun = sum(row["output_tokens"] > 0 for row in rows if "-beam-" not in row["id"])
                seen |= {row["id"] for row in rows if "-beam-" in row["id"]}
                await asyncio.sleep(0.02)

    async def row(self, call_id: str) -> tuple[Used, str]:
        """What a call has used, and its status, once it is over."""
        wanted = "SELECT prompt, output, status FROM usage WHERE call_id = ?"
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while True:
            with contextlib.closing(sqlite3.connect(self.fleet.folder / "kvmig.sqlite")) as file:
                rows = file.execute(wanted, (call_id,)).fetchall()
            if rows and all(status != "running" for _, _, status in rows):
                ((prompt, output, status),) = rows
                return Used(prompt, output), status
            assert time.monotonic() < deadline, rows
            await asyncio.sleep(0.1)


def told(answer: httpx.Response) -> Used:
    """What the answer says, by the names of each API."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [
            json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
        ]
        found: dict[str, Any] = {}
        for event in events:
            if not event.get("choices"):
                inner = event.get("response") or event.get("message") or event
                found |= inner.get("usage") or {}
    else:
        body = answer.json()
        found = body.get("usage") or body["meta"]["billed_units"]
    prompt = found.get("prompt_tokens", found.get("input_tokens"))
    output = found.get("completion_tokens", found.get("output_tokens"))
    assert prompt, found
    return Used(prompt, output or 0)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    from bench.models import model_folder

    source = f"path:{model_folder('count').absolute()}"
    folder = tmp_path_factory.mktemp("ledger")
    judges = {
        CLASSIFIES: (tiny_judges.classifier(folder), "--runner=pooling"),
        DECIDES: (tiny_judges.decider(folder), "--max-model-len=2048"),
    }
    with ToyFleet(folder) as fleet:
        two = {"min": 2, "max": 2, "target": 1}
        flags = [*SMALL, "--max-model-len=2048", "--enable-scale-out"]
        fleet.add({"name": GENERATES, "source": source, "flags": flags, "instances": two})
        flags = [*SMALL, "--runner=pooling", "--convert=embed"]
        fleet.add({"name": EMBEDS, "source": source, "flags": flags})
        for name, (model, flag) in judges.items():
            fleet.add({"name": name, "source": f"path:{model}", "flags": [*SMALL, flag]})
        fleet.until(f"models/{GENERATES}", state="serving", serving=2)
        yield Ledger(fleet)


@pytest.mark.parametrize("route", CHARGED, ids=lambda route: str(route.path))
async def test_the_ledger_says_what_the_answer_says_of_its_use(
    ledger: Ledger, route: ClientRoute
) -> None:
    cases = CASES[route.path]  # each route that is charged has one
    answers = await asyncio.gather(*(ledger.ask(route.path, case) for case in cases))
    for case, (call_id, answer) in zip(cases, answers, strict=True):
        if not case.served:
            assert answer.is_error, case
            continue
        assert answer.status_code == 200, (case, answer.text)
        wanted = told(answer)
        assert wanted.output or route.charge == "prompt"
        assert await ledger.row(call_id) == (wanted, "finished"), case


async def test_what_moves_or_runs_again_is_what_the_answer_says(ledger: Ledger) -> None:
    fleet = ledger.fleet
    long = {"prompt": TEXTS, "max_tokens": 300, "temperature": 0}
    stream = {**long, "stream": True, "stream_options": USAGE}
    cases = [
        generates(**long), generates(**stream), generates(**stream),
        generates(**{**long, "max_tokens": 60}, n=3, use_beam_search=True),
    ]  # fmt: skip
    path = "/v1/completions"
    for fault in ("scale", "kill"):
        calls = [asyncio.create_task(ledger.ask(path, case)) for case in cases]
        await asyncio.sleep(0.5)
        if fault == "scale":
            scale = {"min": 1, "max": 1}
            await asyncio.to_thread(fleet.ask, "POST", f"models/{GENERATES}/scale", scale)
        else:
            kill((await asyncio.to_thread(fleet.processes, "kvmig.launcher.llumlet_main"))[0])
        for call_id, answer in await asyncio.gather(*calls):
            assert answer.status_code == 200, answer.text
            assert await ledger.row(call_id) == (told(answer), "finished")
        scale = {"min": 2, "max": 2}
        await asyncio.to_thread(fleet.ask, "POST", f"models/{GENERATES}/scale", scale)
        await asyncio.to_thread(fleet.until, f"models/{GENERATES}", state="serving", serving=2)


LEAVES = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1500},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1500},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1500},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1500},
}


async def test_a_call_whose_client_leaves_is_cut_in_every_api_with_a_stream_or_without(
    ledger: Ledger,
) -> None:
    bodies = [(path, {**LEAVES[path], "temperature": 0, "stream": stream})
              for path in LEAVES for stream in (False, True)]  # fmt: skip
    beams = {**LEAVES["/v1/completions"], "n": 3, "use_beam_search": True}
    calls = {
        uuid.uuid4().hex: (path, {"model": GENERATES, **body})
        for path, body in [*bodies, ("/v1/completions", beams)]
    }
    async with ledger.fleet.client() as http:
        running = [
            asyncio.create_task(http.post(path, json=body, headers={"x-request-id": call_id}))
            for call_id, (path, body) in calls.items()
        ]
        await ledger.until_running(len(bodies), beams=True)
        assert not any(call.done() for call in running)
        for call in running:
            call.cancel()
        await asyncio.wait(running)
    for call_id in calls:
        used, status = await ledger.row(call_id)
        assert status == "cut"
        assert 0 < used.prompt < 200
        assert 0 < used.output < 3 * 1500


async def test_a_call_that_the_engine_refuses_is_in_the_ledger_and_has_used_nothing(
    ledger: Ledger,
) -> None:
    cases = [
        generates(prompt=[1] * 3000, max_tokens=5),
        generates(prompt=TEXT, max_tokens=5, n=2, temperature=0),
        generates(prompt=TEXT, max_tokens=5, structured_outputs={"regex": "("}),
    ]
    for case in cases:
        call_id, answer = await ledger.ask("/v1/completions", case)
        assert 400 <= answer.status_code < 500, answer.text
        assert await ledger.row(call_id) == (Used(0, 0), "cut")


async def test_beams_cost_a_quota_what_their_client_gets(ledger: Ledger) -> None:
    key = new_key(ledger.fleet, quota=1000, period="total")
    case = generates(prompt=TEXT, max_tokens=40, n=4, use_beam_search=True)
    call_id, answer = await ledger.ask("/v1/completions", case, key)
    assert answer.status_code == 200, answer.text
    assert await ledger.row(call_id) == (told(answer), "finished")
    assert told(answer) == Used(len(TEXT), 160)


async def test_a_batch_within_a_quota_is_answered_and_costs_what_it_says(ledger: Ledger) -> None:
    key = new_key(ledger.fleet, quota=10_000, period="total")
    prompts = [[number, 2, 3, 4, 5] for number in range(1, 101)]
    case = generates(prompt=prompts, max_tokens=1)
    call_id, answer = await ledger.ask("/v1/completions", case, key)
    assert answer.status_code == 200, answer.text
    assert await ledger.row(call_id) == (Used(500, 100), "finished")
    assert told(answer) == Used(500, 100)
    many = [generates(prompt=prompts[:8], max_tokens=2) for _ in range(16)]
    answers = await asyncio.gather(*(ledger.ask("/v1/completions", one, key) for one in many))
    assert [one.status_code for _, one in answers] == [200] * 16
    case = embeds(input=[[1, 2, 3]] * 200)
    call_id, answer = await ledger.ask("/v1/embeddings", case, key)
    assert answer.status_code == 200, answer.text
    assert await ledger.row(call_id) == (Used(600, 0), "finished")


CUT = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 300},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 300},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 300},
    "/v1/messages": {"messages": CHAT, "max_tokens": 300},
    "/v1/chat/completions/batch": {"messages": [CHAT, CHAT], "max_tokens": 300},
}


@pytest.mark.parametrize("path", CUT)
async def test_an_answer_that_a_quota_cuts_is_what_it_paid_for(ledger: Ledger, path: str) -> None:
    key = new_key(ledger.fleet, quota=200, period="total")
    call_id, answer = await ledger.ask(path, generates(**CUT[path], temperature=0), key)
    assert answer.status_code == 200, answer.text
    assert "used up" in answer.headers["x-kvmig-truncated"]
    assert told(answer).output
    assert sum(told(answer)) == 200
    assert await ledger.row(call_id) == (told(answer), "finished")


async def test_beams_beyond_a_quota_are_refused_and_cost_nothing(ledger: Ledger) -> None:
    key = new_key(ledger.fleet, quota=100, period="total")
    case = generates(prompt=TEXT, max_tokens=60, n=3, use_beam_search=True)
    call_id, answer = await ledger.ask("/v1/completions", case, key)
    assert answer.status_code == 429, answer.text
    assert await ledger.row(call_id) == (Used(0, 0), "cut")
