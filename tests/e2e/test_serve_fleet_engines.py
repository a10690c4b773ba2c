"""A fleet with real servers of others: plain vLLM, transformers' own, llama.cpp's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmig.models import BUNDLED
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.e2e.test_serve_fleet_command import ledger
from tests.support.command_site import FollowedStream
from tests.support.fleets import ToyFleet, ask, counted, ended
from tests.support.waiting import until, until_yes, wait_until

pytestmark = [pytest.mark.server, pytest.mark.long]

VLLM = f"{sys.executable} -m vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; the command itself needs the metadata of a package `vllm`."""
TRANSFORMERS = f"{sys.executable} -m transformers.cli.transformers"
LLAMA = "KVMIG_LLAMA_PYTHON"
"""Environment variable: a Python with `llama-cpp-python[server]` and `gguf`."""
STREAMS = 40
TOKENS = 30
EVERY = ("vllm", "transformers", "llama")


@pytest.fixture(scope="module")
def whole_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    with ToyFleet(tmp_path_factory.mktemp("fleet"), "--allow-commands") as made:
        yield made


@pytest.fixture
def fleet(whole_fleet: ToyFleet) -> Iterator[ToyFleet]:
    """Afterwards there is no model, and nothing of one runs."""
    yield whole_fleet
    whole_fleet.ask("DELETE", "models/other")
    wait_until(lambda: not whole_fleet.processes("kvmig.command.guard"))


@pytest.fixture
def key(fleet: ToyFleet) -> str:
    return str(fleet.ask("POST", "keys", {"user": "admin"}).json()["key"])


def llama_of(folder: Path) -> dict[str, Any]:
    """llama.cpp's server with the bundled model, which is made a GGUF file for it."""
    python = os.environ.get(LLAMA, "")
    if not python:
        pytest.skip(f"{LLAMA} names no Python with llama-cpp-python[server] and gguf")
    file = folder / "count.gguf"
    maker = Path(__file__).parents[1] / "support" / "make_gguf.py"
    subprocess.run([python, str(maker), str(file)], check=True, timeout=SERVER_PATIENCE_S)
    command = (
        f"{python} -m llama_cpp.server --model {{model}} --model_alias {{name}} --host 127.0.0.1"
        " --port {port} --n_ctx 4096"
    )
    return {
        "source": f"path:{file}", "command": command, "health": "/v1/models", "parallel": 1,
    }  # fmt: skip


def spec_of(engine: str, folder: Path) -> dict[str, Any]:
    """A model of the fleet that the engine's own server serves."""
    if engine == "vllm":
        flags = "--enforce-eager --max-model-len 4096 --max-num-seqs 64 --dtype float32"
        command = (
            f"env VLLM_CPU_KVCACHE_SPACE=1 {VLLM} --model {{model}} --host 127.0.0.1"
            f" --port {{port}} --served-model-name {{name}} {flags}"
        )
        own: dict[str, Any] = {"command": command}
    elif engine == "transformers":
        pytest.importorskip("accelerate", reason="transformers' server needs it to load a model")
        command = f"{TRANSFORMERS} serve {{model}} --host 127.0.0.1 --port {{port}}"
        own = {
            "command": f"{command} --device {{device}} --dtype float32",
            "served": str(BUNDLED.absolute()),
            "parallel": 4,
        }
    else:
        own = llama_of(folder)
    return {
        "name": "other", "source": f"path:{BUNDLED.absolute()}", "engine": "command",
        "memory": 2 << 30, "share_prefixes": True, "instances": {"max": 1, "zero_after_s": 5},
        **own,
    }  # fmt: skip


@pytest.mark.parametrize("engine", EVERY)
async def test_a_real_server_answers_from_zero_under_streams_and_is_counted_exactly(
    fleet: ToyFleet, key: str, engine: str, tmp_path: Path
) -> None:
    fleet.add(spec_of(engine, tmp_path))
    streams = [FollowedStream() for _ in range(STREAMS)]
    async with fleet.client(key) as http:
        http.timeout = 600
        await asyncio.gather(
            *(
                one.follow(http, "/v1/completions", ask("other", TOKENS, number))
                for number, one in enumerate(streams)
            )
        )
        assert {one.error for one in streams} == {""}
        assert [one.text for one in streams] == [counted(TOKENS, n) for n in range(STREAMS)]
        (row,) = await asyncio.to_thread(fleet.instances, "other")  # it goes to zero soon
        plain = await http.post("/v1/completions", json=ask("other", TOKENS))
        usage = plain.json()["usage"]
    assert usage["completion_tokens"] == TOKENS
    await until_yes(lambda: len(ledger(fleet, key)) == STREAMS + 1)
    rows = ledger(fleet, key)
    assert Counter(status for status, _, _ in rows) == {"finished": STREAMS + 1}
    if engine != "llama":  # its streams say nothing of usage
        assert {(prompt, output) for _, prompt, output in rows} == {
            (usage["prompt_tokens"], TOKENS)
        }
    fleet.until("models/other", state="zero", serving=0)
    assert ended(row["pid"])


async def test_plain_vllm_that_is_killed_amid_streams_costs_what_they_had(
    fleet: ToyFleet, key: str, tmp_path: Path
) -> None:
    fleet.add({**spec_of("vllm", tmp_path), "instances": {"min": 1, "max": 1}})
    fleet.until("models/other", state="serving", serving=1)
    streams = [FollowedStream() for _ in range(10)]
    async with fleet.client(key) as http:
        tasks = [
            asyncio.create_task(one.follow(http, "/v1/completions", ask("other", 3000, 1)))
            for one in streams
        ]
        await until(lambda: all(len(one.text) >= 50 for one in streams), within_s=SERVER_PATIENCE_S)
        (row,) = fleet.instances("other")
        os.kill(row["pid"], signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert {one.error for one in streams} == {"the server ended while it answered"}
        assert all(counted(3000, 1).startswith(one.text) for one in streams)
        fleet.until("models/other", serving=0)
        again = await http.post("/v1/completions", json=ask("other", 5, 1), timeout=600)
        assert again.json()["choices"][0]["text"] == counted(5, 1)
    await until_yes(lambda: len(ledger(fleet, key)) == 11)
    cut = sorted(output for status, _, output in ledger(fleet, key) if status == "cut")
    got = sorted(sum(bool(event.get("choices")) for event in one.events) for one in streams)
    assert cut == got  # an event is a token, or more where the server was late


async def test_a_real_server_of_embeddings_is_passed_on_and_counted_as_it_says(
    fleet: ToyFleet, key: str, tmp_path: Path
) -> None:
    spec = spec_of("vllm", tmp_path)
    spec["command"] += " --runner pooling --convert embed"
    fleet.add(spec)
    texts = {"model": "other", "input": ["one two", "three"]}
    ranks = {"model": "other", "query": "one", "documents": ["two", "one"]}
    pairs = {"model": "other", "text_1": "one", "text_2": ["one", "two"]}
    async with fleet.client(key) as http:
        http.timeout = 600
        embedded = (await http.post("/v1/embeddings", json=texts)).json()
        ranked = (await http.post("/v1/rerank", json=ranks)).json()
        scored = (await http.post("/v1/score", json=pairs)).json()
        refused = await http.post("/v1/completions", json=ask("other", 5))
    first, second = (one["embedding"] for one in embedded["data"])
    assert len(first) == len(second) > 1
    assert first != second
    assert [one["index"] for one in ranked["results"]] == [1, 0]
    assert next(one["score"] for one in scored["data"]) == pytest.approx(1, abs=1e-3)
    assert refused.status_code in (400, 404)
    await until_yes(lambda: len(ledger(fleet, key)) == 4)
    said = [answer["usage"]["prompt_tokens"] for answer in (embedded, ranked, scored)]
    assert [(prompt, output) for _, prompt, output in ledger(fleet, key)] == [
        *((one, 0) for one in said), (0, 0),
    ]  # fmt: skip
