"""A fleet whose models come from a hub: from nothing to an answer, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import PATH, ToyFleet, ask, counted, ended, kill
from tests.support.mirrors import free_port
from tests.support.model_hub import TOKEN, ModelHub, small_model
from tests.support.waiting import until, wait_until

pytestmark = [pytest.mark.server, pytest.mark.long]

NAME = "Org/Small-1B"
SOURCE = f"hf:{NAME}"
HUB_PORT = free_port()


@pytest.fixture(scope="module")
def hub() -> Iterator[ModelHub]:
    with ModelHub() as made:
        made.add(NAME, small_model(4_000_000))
        yield made


@pytest.fixture(scope="module")
def fleet(hub: ModelHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_ENDPOINT", hub.url)
        patched.setenv("HF_HUB_OFFLINE", "0")
        with ToyFleet(tmp_path_factory.mktemp("fleet"), f"--hub-port={HUB_PORT}") as made:
            yield made


def kvmig(fleet: ToyFleet, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvmig", f"--data={fleet.folder}", *words],
        capture_output=True,
        text=True,
        timeout=SERVER_PATIENCE_S,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


async def test_a_call_waits_for_files_hears_how_far_they_are_and_outlives_the_server(
    fleet: ToyFleet, hub: ModelHub
) -> None:
    hub.faults.hold_after = 3_500_000
    fleet.add_toy("a", source=SOURCE, heartbeat_after_s=0)
    said: list[str] = []
    texts: list[str] = []

    def follow() -> None:
        headers = {"authorization": f"Bearer {fleet.key}"}
        with (
            httpx.Client(base_url=fleet.url, headers=headers, timeout=SERVER_PATIENCE_S) as client,
            client.stream("POST", PATH, json=ask("a", 20, stream=True)) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith(": "):
                    said.append(line)
                if line.startswith("data: {"):
                    texts.extend(one["text"] for one in json.loads(line[6:])["choices"])

    client = threading.Thread(target=follow)
    client.start()
    await until(lambda: fleet.get("models/a")["files"]["done"] > 2_000_000)
    await until(lambda: any("its files are downloaded" in one for one in said))
    shown = fleet.get("models/a")
    assert shown["state"] == "waiting"
    assert "its files are downloaded: " in shown["why"]
    (server,) = fleet.processes("kvmig.fleet.server")
    (fetcher,) = fleet.processes("kvmig.sources.fetcher")
    kill(server)
    await until(lambda: ended(fetcher))
    hub.faults.hold_after = None
    hub.faults.held.set()
    await asyncio.to_thread(client.join, SERVER_PATIENCE_S)

    assert "".join(texts) == counted(20)
    assert fleet.get("models/a")["files"]["state"] == "whole"
    assert int(hub.downloads("model.safetensors")[-1].removeprefix("bytes=").rstrip("-")) > 0
    assert fleet.ask("DELETE", "models/a").status_code == 200
    assert fleet.ask("DELETE", f"files?source={SOURCE}").status_code in (200, 409)


def test_run_goes_from_nothing_to_an_answer_in_one_command(fleet: ToyFleet, hub: ModelHub) -> None:
    hub.add("Org/Other-2B", small_model(400_000))
    done = kvmig(fleet, "run", "Org/Other-2B", "Count: 0017 0018", "--engine", "toy",
                 "--max-tokens", "5")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "kvmig: other-2b is hf:Org/Other-2B" in done.stderr
    again = kvmig(fleet, "run", "Org/Other-2B", "Count: 0017 0018", "--max-tokens", "5")
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip()
    listed = kvmig(fleet, "ps")
    assert "other-2b" in listed.stdout
    files = kvmig(fleet, "model", "files", "ls")
    assert "hf:Org/Other-2B" in files.stdout
    assert hub.downloads("model.safetensors").count("") <= 2
    assert kvmig(fleet, "rm", "other-2b").returncode == 0


def test_a_model_that_its_hub_does_not_have_fails_with_the_hubs_reason_for_operators(
    fleet: ToyFleet,
) -> None:
    done = kvmig(fleet, "run", "Org/None", "Hello", "--engine", "toy")
    assert done.returncode == 1
    assert "has no model Org/None, or it is private and needs a token" in done.stderr
    with httpx.Client(base_url=fleet.url, timeout=SERVER_PATIENCE_S) as client:
        headers = {"authorization": f"Bearer {fleet.key}"}
        answer = client.post(PATH, json=ask("none"), headers=headers)
        near = client.post(PATH, json=ask("nonne"), headers=headers)
    assert answer.status_code == 503
    said = answer.json()["error"]["message"]
    assert said.startswith("its files can't be downloaded; the next try is in ")
    assert "Org/None" not in said, "a source is not for those who only call the model"
    assert near.json()["error"]["message"] == "no model 'nonne'; near it: none"
    assert kvmig(fleet, "rm", "none").returncode == 0


def test_the_fleets_mirror_serves_this_hosts_programs_and_comes_back_when_it_is_killed(
    fleet: ToyFleet, hub: ModelHub
) -> None:
    hub.add("Org/Mirrored", small_model(100_000))
    url = f"http://127.0.0.1:{HUB_PORT}/Org/Mirrored/resolve/main/model.safetensors"
    wanted = small_model(100_000)["model.safetensors"]
    assert httpx.get(url, timeout=30).content == wanted
    sent = hub.sent
    (mirror,) = fleet.processes("kvmig.mirror.__main__")
    kill(mirror)
    wait_until(lambda: fleet.processes("kvmig.mirror.__main__") not in ([], [mirror]))
    assert httpx.get(url, timeout=30).content == wanted
    assert hub.sent == sent


COUNT = Path(__file__).parents[2] / "kvmig" / "models" / "count"
FLAGS = "--enforce-eager --block-size 32 --kv-cache-memory-bytes 268435456"


def test_the_bundled_model_is_evaluated_by_its_headers_then_comes_from_the_hub_and_counts(
    fleet: ToyFleet, hub: ModelHub
) -> None:
    hub.add("Org/Count", {one.name: one.read_bytes() for one in COUNT.iterdir() if one.is_file()})
    before = hub.sent
    ahead = kvmig(fleet, "model", "evaluate", "x", "hf:Org/Count", "--flags", FLAGS, "--json")
    assert ahead.returncode == 0, ahead.stderr
    assert hub.sent - before < 200_000
    here = kvmig(fleet, "model", "evaluate", "x", f"path:{COUNT}", "--flags", FLAGS, "--json")
    sizes = ("files_bytes", "weights_bytes", "kv_bytes", "token_bytes", "request_bytes")
    by_headers, by_files = json.loads(ahead.stdout), json.loads(here.stdout)
    assert {one: by_headers[one] for one in sizes} == {one: by_files[one] for one in sizes}

    done = kvmig(fleet, "run", "Org/Count", "Count from 41", "--flags", FLAGS, "--max-tokens", "20")
    assert done.returncode == 0, done.stderr
    assert "0042 0043" in done.stdout, done.stdout
    assert kvmig(fleet, "rm", "count").returncode == 0


def test_a_gated_models_token_is_in_no_file_answer_or_command_line(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("Org/Gated", small_model(100_000), gated=True)
    (tmp_path / "token").write_text(TOKEN + "\n")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "fleet").mkdir()
    with ToyFleet(tmp_path / "fleet") as fleet:
        done = kvmig(fleet, "run", "hf:Org/Gated", "Count: 0017 0018", "--engine", "toy",
                     "--max-tokens", "5")  # fmt: skip
        assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr
        processes = [psutil.Process(one) for one in fleet.processes("")]
        commands = json.dumps([one.cmdline() for one in processes])
        paths = ("models", "models/gated", "models/gated/logs", "files", "audit", "status")
        answers = json.dumps([fleet.get(one) for one in paths])
        (tmp_path / "token").unlink()
        assert kvmig(fleet, "rm", "gated").returncode == 0
        wait_until(
            lambda: fleet.ask("DELETE", "files?source=hf:Org/Gated").status_code == 200
        )  # once what used them has ended
        refused = kvmig(fleet, "run", "hf:Org/Gated", "Hello", "--engine", "toy")
        assert "hf:Org/Gated is gated, and there is no token" in refused.stderr
        answers += json.dumps([fleet.get(one) for one in paths])
    written = {one: one.read_bytes() for one in (tmp_path / "fleet").rglob("*") if one.is_file()}
    assert {"kvmig.sqlite", "log"} <= {one.name for one in written}
    assert not [str(one) for one, data in written.items() if TOKEN.encode() in data]
    assert TOKEN not in commands + answers + done.stderr + refused.stderr
    assert len(processes) > 3
