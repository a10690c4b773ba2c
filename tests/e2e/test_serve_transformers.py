"""`--engine transformers`: the same server to its clients and operators, without vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from kvmig.models import BUNDLED
from kvmig.serve import main
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import Footprint, assert_server_is_empty, leaving_nothing
from tests.support.streams import (
    Stream,
    count_from,
    counted,
    place,
    run_moved,
    run_unmoved,
    start_stream,
)

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(BUNDLED)
LAST_DIGITS = 1e-5
"""Log-probabilities of tokens that were computed several in a step."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Count from 0042"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, count_from(17, 300)),
    "seeded": (
        COMPLETIONS, count_from(17, 300, temperature=1.8, seed=7, top_p=0.9, top_k=50, logprobs=2),
    ),
    "stop string": (COMPLETIONS, count_from(17, 1500, stop=["0060", "0055"])),
    "chat": (
        CHAT, {"messages": MESSAGES, "max_tokens": 200, "temperature": 1.5, "seed": 6,
            "min_p": 0.01, "logprobs": True, "top_logprobs": 1},
    ),
}  # fmt: skip
SELDOM = ("greedy", "seeded")
"""What others hold, too: the chat is seeded, the one with a stop string greedy."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """On a machine where to import vLLM is an error."""
    folder = tmp_path_factory.mktemp("without-vllm")
    (folder / "vllm.py").write_text("raise ImportError('a transformers server needs no vLLM')\n")
    flags = ["--engine=transformers", *PATIENT, NEVER_BY_ITSELF, "--shutdown-timeout=5"]
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    with leaving_nothing(Served(flags, environment=environment, log=folder / "log")) as served:
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    yield server
    assert_server_is_empty(server)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as one:
        yield one


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=pytest.mark.long if one in SELDOM else ()) for one in CALLS],
)
async def test_a_stream_moved_twice_equals_the_one_left_alone(served: Served, kind: str) -> None:
    path, body = CALLS[kind]
    unmoved = await run_unmoved(served, path, body)

    moved, reports = await run_moved(served, path, body)

    assert [report["state"] for report in reports] == ["committed"] * 2, reports
    assert moved.tokens > 120
    moved.same_as(unmoved)


async def test_the_openai_package_gets_completions_and_chats_whole_and_streamed(
    client: openai.AsyncOpenAI,
) -> None:
    (model,) = [one.id async for one in client.models.list()]
    chunks = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count from 0042"}], stream=True,
        max_completion_tokens=14, temperature=0, stream_options={"include_usage": True},
    )  # fmt: skip
    parts = [chunk async for chunk in chunks]
    assert "".join(one.choices[0].delta.content or "" for one in parts[:-1]) == "0042 0043 0044"
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 14

    words = await client.completions.create(
        model=model, prompt="Count: 0017 0018", stream=True, max_tokens=9, temperature=0
    )
    assert "".join([word.choices[0].text async for word in words]) == " 0019 002"

    whole = await client.completions.create(
        model=model, prompt="Count: 0017 0018", max_tokens=50, temperature=0, stop=" 0021"
    )
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" 0019 0020", "stop")

    several = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count from 0042"}], n=2, seed=5,
        max_completion_tokens=14, temperature=2, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    second = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count from 0042"}], seed=6,
        max_completion_tokens=14, temperature=2,
    )  # fmt: skip
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[1].message.content == second.choices[0].message.content
    logprobs = several.choices[0].logprobs
    entries = logprobs.content if logprobs else None
    assert entries
    assert {len(entry.top_logprobs) for entry in entries} == {2}


@pytest.mark.parametrize(
    ("path", "field", "value", "said"),
    [
        (COMPLETIONS, "presence_penalty", 0.5, "presence_penalty is 0.5: must be 0 with this"),
        (COMPLETIONS, "best_of", 2, "best_of is 2: must be 1 with this engine"),
        (COMPLETIONS, "top_p", 1.5, "top_p is 1.5"),
        (COMPLETIONS, "n", 17, "n is 17"),
        (COMPLETIONS, "logprobs", 21, "logprobs is 21"),
        (CHAT, "top_logprobs", 2, "top_logprobs wants logprobs, which must be true"),
        (COMPLETIONS, "guided_regex", "a*", "there is no field guided_regex, allowed are"),
        (COMPLETIONS, "prompt", ["a", "b"], "must be one prompt"),
        (COMPLETIONS, "prompt", [1, 900], "prompt has token ids that are not in 0 to 263"),
        (COMPLETIONS, "max_tokens", 9000, "together must be 8192 or less"),
        (CHAT, "tools", [{"type": "function"}], "must be [] with this engine"),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "audio"}]}], "of type 'text'"),
    ],
)  # fmt: skip
async def test_what_the_engine_cannot_do_is_refused_by_name(
    served: Served, path: str, field: str, value: Any, said: str
) -> None:
    body = {"prompt": "0017"} if path == COMPLETIONS else {"messages": MESSAGES}
    async with httpx.AsyncClient(base_url=served.url, verify=False) as http:
        answer = await http.post(path, json={**body, field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["param"].split(".")[0] == field


async def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    stream = await start_stream(served, count_from(17, 8000), 5)
    await stream.leave()
    body = {"model": served.model, **count_from(18, 8000)}
    async with httpx.AsyncClient(base_url=served.url, verify=False) as http:
        whole = asyncio.create_task(http.post(COMPLETIONS, json=body, timeout=SERVER_PATIENCE_S))
        async with asyncio.timeout(SERVER_PATIENCE_S):
            while not await asyncio.to_thread(served.get, "requests"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        whole.cancel()
        await asyncio.wait([whole])
    # `served` asserts that nothing runs any more


async def test_a_stream_goes_on_elsewhere_when_its_instance_is_killed(served: Served) -> None:
    stream = Stream(served, COMPLETIONS, count_from(17, 600))
    await place(served, stream, "i1")
    (killed,) = [
        one
        for one in Footprint.of(served).named("kvmig.launcher.llumlet_main")
        if any("-i1-" in file.path and "+" in file.mode for file in one.open_files())
    ]
    killed.kill()

    answer = await stream.end()

    assert answer.tokens == 600
    counted(answer, 17)
    psutil.wait_procs([killed], timeout=SERVER_PATIENCE_S)
    async with httpx.AsyncClient(base_url=served.url, verify=False) as http:
        metrics = (await http.get("/metrics")).text
    assert "kvmig_requests_run_again_total 1.0" in metrics


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engine", "nonsense"], "--engine is nonsense, must be vllm or transformers"),
        (["--engine=transformers", "--num-blocks=0"], "num_blocks is 0, must be 1 or more"),
        (["--engine=transformers", "--device=tpu"], "device is 'tpu', must be cpu or cuda"),
        (["--engine=transformers", "--device=cuda"], "--device is cuda, but this machine has no"),
        (["--engine=transformers", "--enforce-eager"], "unrecognized arguments: --enforce-eager"),
        (
            ["--engine=transformers", "--instance-flags=i1: --block-size 32"],
            "--block-size must be the same for all instances with --engine transformers",
        ),
        (["--engine=transformers", "--priority-class=high=-1"], "--priority-class can't be used"),
        (["--engine=transformers", "--ray"], "--ray can't be used with --engine transformers"),
    ],
)
def test_a_start_that_cannot_be_says_why(
    flags: list[str],
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([MODEL, *flags]) == 2
    assert said in capfd.readouterr().err
