"""Ray Serve LLM with two replicas on a real Ray node: a stream of one goes on at the other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from kvmig.models import BUNDLED
from kvmig.process.sockets import free_port
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.plugin_entry import entry_point
from tests.support.joined import CommonScheduler, common_scheduler
from tests.support.plugin_server import ROOT
from tests.support.ray_nodes import RAYS_OWN
from tests.support.streams import Door, Stream, count_from, run_unmoved
from tests.support.waiting import until_yes, wait_until

ray = pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
pytest.importorskip("grpc_reflection", reason="needs grpcio-reflection, for Ray Serve")
pytest.importorskip("pyarrow", reason="needs pyarrow, for Ray Serve LLM")

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

PATH = "/v1/completions"
MODEL = "count"
ENGINE = {
    "enforce_eager": True, "block_size": 32, "max_model_len": 1216, "max_num_seqs": 4,
    "num_gpu_blocks_override": 64, "dtype": "float32",
}  # fmt: skip


class Deployment(NamedTuple):
    """Where clients call it, and where each replica's own server listens."""

    door: Door
    servers: tuple[str, str]


def servers() -> list[str]:
    """The URLs of the replicas' servers, which are processes of this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "kvmig.serve" in words and f"--served-model-name={MODEL}" in words:
            ports = [word for word in words if word.startswith("--port=")]
            found.append(f"http://127.0.0.1:{ports[0].partition('=')[2]}")
    return found


def environment_of(scheduler: CommonScheduler, folder: Path) -> dict[str, str]:
    """Of the replicas: the engine's class, the scheduler, and kvmig as if it were installed."""
    path = f"{entry_point(folder)}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    engine = "examples.ray_serve.JoinedEngine"
    return {"RAYLLM_VLLM_ENGINE_CLS": engine, "PYTHONPATH": path, **scheduler.environment}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    entry = folder / "entry"
    entry.mkdir()
    with pytest.MonkeyPatch.context() as patch, common_scheduler(folder) as scheduler:
        for name, value in RAYS_OWN.items():
            patch.setenv(name, value)
        ray.init(num_cpus=8, include_dashboard=False, object_store_memory=80_000_000)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            config = LLMConfig(
                model_loading_config={"model_id": MODEL, "model_source": str(BUNDLED)},
                deployment_config={"num_replicas": 2},
                accelerator_config={"kind": "cpu"},
                engine_kwargs=ENGINE,
                runtime_env={"env_vars": environment_of(scheduler, entry)},
            )
            serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)
            wait_until(lambda: len(servers()) == 2, SERVER_PATIENCE_S)
            one, two = servers()
            yield Deployment(Door(f"http://127.0.0.1:{port}", MODEL, "none"), (one, two))
        finally:
            serve.shutdown()
            ray.shutdown()


def known(server: str) -> int:
    """The number of instances that it knows."""
    return len(httpx.get(f"{server}/kvmig/v1/instances", timeout=SERVER_PATIENCE_S).json()["data"])


async def rows(http: httpx.AsyncClient, server: str, what: str) -> list[dict[str, Any]]:
    answer = await http.get(f"{server}/kvmig/v1/{what}")
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


async def test_a_stream_moved_to_the_other_replica_and_back_equals_one_that_stayed(
    deployed: Deployment,
) -> None:
    body = count_from(17, 600, temperature=1.0, seed=5, logprobs=2)
    async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S) as http:
        await until_yes(lambda: [known(one) for one in deployed.servers] == [2, 2])
        unmoved = await run_unmoved(deployed.door, PATH, body)
        stream = Stream(deployed.door, PATH, body)
        states = []
        for tokens in (20, 200):
            await stream.reach(tokens)
            states.append(await moved(http, deployed))

    assert states == ["committed", "committed"]
    (await stream.end()).same_as(unmoved)


async def moved(http: httpx.AsyncClient, deployed: Deployment) -> str:
    """Move the one request that runs to where it doesn't; what became of it."""
    for server in deployed.servers:
        for row in await rows(http, server, "requests"):
            instances = [one["id"] for one in await rows(http, server, "instances")]
            instances.remove(row["instance"])
            order = {"request_id": row["id"], "destination": instances[0]}
            answer = await http.post(f"{server}/kvmig/v1/migrations", json=order)
            return str(answer.json().get("state", answer.text))
    return "no request runs"


async def test_a_call_that_the_server_refuses_is_refused_by_the_deployment(
    deployed: Deployment,
) -> None:
    async with httpx.AsyncClient(base_url=deployed.door.url, timeout=SERVER_PATIENCE_S) as http:
        call = {"model": MODEL, "prompt": "Count", "max_tokens": 100_000}
        answer = await http.post(PATH, json=call)

    assert answer.status_code == 400
    assert "100000" in answer.text or "1216" in answer.text


async def test_nothing_is_left_of_the_replicas_servers_once_the_deployment_has_ended(
    deployed: Deployment,
) -> None:
    """The last test of this file."""
    from ray import serve

    await asyncio.to_thread(serve.shutdown)

    await until_yes(lambda: servers() == [])
