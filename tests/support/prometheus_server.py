"""A Prometheus of the tests' own, which scrapes a fleet every second."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvmig.process.sockets import free_port
from tests.support.waiting import wait_until

PROGRAM = shutil.which("prometheus")
STOP_S = 30.0


class PrometheusServer:
    """Its answers."""

    def __init__(self, port: int) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20.0)

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def samples(self, query: str) -> list[dict[str, Any]]:
        """What a query gives now, without values that are no numbers. Raises AssertionError for a
        query that is wrong."""
        answer = self.http.get("/api/v1/query", params={"query": query, "time": f"{time.time()}"})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return [one for one in found if not math.isnan(float(one["value"][1]))]

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        answer = self.http.get("/api/v1/alerts").json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in answer if one["state"] == "firing"}

    def wait_firing(self, *names: str) -> None:
        """Return once all of these fire."""
        wait_until(lambda: set(names) <= self.firing())

    def wait_calm(self) -> None:
        """Return once none fires."""
        wait_until(lambda: not self.firing())


@contextmanager
def prometheus_of(
    folder: Path, target: str, key: str, rules: dict[str, Any]
) -> Iterator[PrometheusServer]:
    """It scrapes a fleet's proxy, and evaluates the rules, every second.

    target: host and port. key: an admin's.
    """
    assert PROGRAM is not None
    port = free_port()
    (folder / "admin-key").write_text(key)
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    scrape = {
        "job_name": "kvmig",
        "honor_labels": True,
        "authorization": {"credentials_file": "admin-key"},
        "static_configs": [{"targets": [target]}],
    }
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        PROGRAM, f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    made = PrometheusServer(port)
    try:
        wait_until(lambda: made.is_ready() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield made
    finally:
        made.http.close()
        process.terminate()
        process.wait(STOP_S)
