"""Mirrors on three hosts with networks of their own: one download, also without one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants, snapshot_download

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import PATH, ToyFleet, ask, counted
from tests.support.mirrors import MirrorProcess
from tests.support.model_hub import ModelHub, small_model
from tests.support.network import Network, hosts_or_skip
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.long]

LARGE = 20_000_000


@pytest.fixture
def network() -> Iterator[Network]:
    with hosts_or_skip(3) as made:
        yield made


@pytest.fixture
def hub(network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ModelHub(network.outside) as made:
        yield made


@pytest.fixture
def mirrors(network: Network, hub: ModelHub, tmp_path: Path) -> Iterator[list[MirrorProcess]]:
    urls = [f"http://{one.address}:8090" for one in network.hosts]
    made = [
        MirrorProcess(hub, tmp_path / f"m{at}", url, urls, network.hosts[at].enter)
        for at, url in enumerate(urls)
    ]
    try:
        for one in made:
            one.wait_ready()
        yield made
    finally:
        for one in made:
            one.end()


def snapshot(mirror: MirrorProcess, cache: Path, name: str) -> dict[str, bytes]:
    found = snapshot_download(name, endpoint=mirror.url, cache_dir=cache, token=False)
    root = Path(found)
    return {
        str(one.relative_to(root)): one.read_bytes() for one in root.rglob("*") if one.is_file()
    }


def test_three_hosts_get_a_model_by_one_download_and_go_on_when_one_of_them_is_cut_off(
    network: Network, hub: ModelHub, mirrors: list[MirrorProcess], tmp_path: Path
) -> None:
    files = small_model(LARGE)
    hub.add("org/first", files)
    with ThreadPoolExecutor(3) as threads:
        jobs = [
            threads.submit(snapshot, one, tmp_path / f"c{at}", "org/first")
            for at, one in enumerate(mirrors)
        ]
        assert all(job.result(60) == files for job in jobs)
    assert hub.sent == sum(map(len, files.values()))

    network.isolate(network.hosts[0])
    second = small_model(LARGE + 1)
    hub.add("org/second", second)
    before = hub.sent
    assert snapshot(mirrors[1], tmp_path / "d1", "org/second") == second
    assert snapshot(mirrors[2], tmp_path / "d2", "org/second") == second
    assert hub.sent - before == LARGE + 1, "the small files are those of the first model"


HF = Path(sys.executable).with_name("hf")
SNAPSHOT = "import huggingface_hub as it; print(it.snapshot_download({name!r}, cache_dir={to!r}))"


def test_hf_download_a_plain_client_and_a_fleet_use_the_mirrors_of_their_hosts_by_hf_endpoint(
    network: Network,
    hub: ModelHub,
    mirrors: list[MirrorProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, files = "Org/Plain-1B", small_model(LARGE)
    hub.add(name, files)
    caches = [tmp_path / "hf", tmp_path / "plain"]
    commands = [
        [str(HF), "download", name, "--cache-dir", str(caches[0])],
        [sys.executable, "-c", SNAPSHOT.format(name=name, to=str(caches[1]))],
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment |= {"HF_HOME": str(tmp_path / "home")}
    clients = [
        subprocess.Popen([*host.enter, *words], env={**environment, "HF_ENDPOINT": mirror.url})
        for host, mirror, words in zip(network.hosts, mirrors, commands, strict=False)
    ]
    monkeypatch.setenv("HF_ENDPOINT", mirrors[2].url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    third = network.hosts[2]
    try:
        with ToyFleet(tmp_path, host=third.address, enter=third.enter) as fleet:
            fleet.add_toy("plain", source=f"hf:{name}")
            wait_until(lambda: fleet.get("models/plain")["files"]["state"] == "whole")
            assert [one.wait(120) for one in clients] == [0, 0]
            answer = httpx.post(
                f"{fleet.url}{PATH}", json=ask("plain", 5), timeout=SERVER_PATIENCE_S,
                headers={"authorization": f"Bearer {fleet.key}"},
            )  # fmt: skip
            assert answer.json()["choices"][0]["text"] == counted(5)
    finally:
        for one in clients:
            one.kill()
            one.wait(20)
    for cache in caches:
        (root,) = cache.glob("*/snapshots/*")
        assert {one.name: one.read_bytes() for one in root.iterdir() if one.is_file()} == {
            one: data for one, data in files.items() if "/" not in one
        }
    assert hub.sent == sum(map(len, files.values()))
