"""The parts of `deploy/compose`, as plain processes: the fleet on PostgreSQL, and Prometheus."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvmig.process.sockets import free_port
from tests.support.postgres import Cluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.long]

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "compose"
SERVICES: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
STOP_S = 60.0


@contextmanager
def running(
    command: Sequence[str | Path], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process until it is stopped in order."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(one) for one in command], env={**os.environ, **environment}, stdout=out, stderr=out
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str, **headers: str) -> httpx.Response | None:
    """An answer of 200; None: there is none."""
    try:
        answer = httpx.get(url, headers=headers, timeout=5)
    except httpx.HTTPError:
        return None
    return answer if answer.status_code == 200 else None


def with_flags(command: Sequence[str], own: dict[str, str]) -> list[str]:
    """The command, with these flags' values in place of its own."""
    words = list(command)
    for flag, value in own.items():
        words[words.index(flag) + 1] = value
    return words


def prometheus_config(folder: Path, port: int, key: Path) -> Path:
    """The compose file's, for this host."""
    config = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    rules = FOLDER.parent / "prometheus"
    pattern = Path(config["rule_files"][0]).name
    config["rule_files"] = [str(rules / pattern)]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    job["authorization"]["credentials_file"] = str(key)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_the_fleet_starts_on_postgresql_and_prometheus_scrapes_it(
    tmp_path: Path, postgres_cluster: Cluster
) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("no prometheus here: Debian's package has it")
    port, shows, data = free_port(), free_port(), tmp_path / "data"
    up = with_flags(SERVICES["kvmig"]["command"], {"--host": "127.0.0.1", "--port": str(port)})
    environment = {
        name: value for name, value in SERVICES["kvmig"]["environment"].items() if "${" not in value
    } | {"KVMIG_DATABASE": postgres_cluster.new(), "KVMIG_DATA": str(data)}  # fmt: skip
    with running([sys.executable, "-m", "kvmig", *up], environment, tmp_path / "kvmig.log"):
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/live"))
        wait_until(lambda: (data / "admin-key").exists())
        config = prometheus_config(tmp_path, port, data / "admin-key")
        own = {
            "--config.file": str(config),
            "--storage.tsdb.path": str(tmp_path / "series"),
        }
        words = [
            f"{name}={own.get(name, value)}"
            for name, value in (one.split("=") for one in SERVICES["prometheus"]["command"])
        ]
        words.append(f"--web.listen-address=127.0.0.1:{shows}")
        with running([prometheus, *words], {}, tmp_path / "prometheus.log"):
            base = f"http://127.0.0.1:{shows}/api/v1"
            wait_until(lambda: scraped(base) == "1")
            rules = answers(f"{base}/rules")
            assert rules is not None
            assert rules.json()["data"]["groups"]


def scraped(base: str) -> str:
    """Whether Prometheus has scraped the fleet: 1 if it has."""
    answer = answers(f'{base}/query?query=up{{job="kvmig"}}')
    if answer is None:
        return ""
    found = answer.json()["data"]["result"]
    return str(found[0]["value"][1]) if found else ""
