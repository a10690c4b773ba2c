"""Which vLLM starts: supported versions, others when asked for, none without what kvmig calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvmig.core.errors import StartupError
from kvmig.engines.kind import ALLOW_UNTESTED
from kvmig.engines.vllm import kind
from kvmig.models import BUNDLED
from kvmig_tools.served import SMALL, Served


@pytest.fixture
def untested(tmp_path: Path) -> Path:
    """A folder that makes the installed vLLM look like 0.99.0."""
    info = tmp_path / "vllm-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.99.0+cpu\n")
    return tmp_path


def test_an_untested_version_is_refused_at_the_door_with_what_to_do(untested: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvmig.serve", str(BUNDLED)],
        env={
            **os.environ,
            "PYTHONPATH": f"{untested}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "vllm 0.99.0+cpu is not supported; kvmig needs 0.32.x, 0.33.x, or" in done.stderr
    assert "--allow-untested-vllm" in done.stderr


@pytest.mark.long
@pytest.mark.server
def test_an_untested_version_that_has_all_names_serves_when_asked_to(
    untested: Path, log_file: Path
) -> None:
    path = f"{untested}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    flags = [*SMALL, "--instances=1", "--allow-untested-vllm"]
    with Served(flags, environment={"PYTHONPATH": path}, log=log_file) as served:
        assert [one["state"] for one in served.get("instances")] == ["serving"]


def test_a_version_without_a_name_that_kvmig_calls_is_refused_by_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "vllm.v1.core.block_pool"
    lacking = ModuleType(name)
    vars(lacking)["BlockPool"] = SimpleNamespace(get_num_free_blocks=None)
    monkeypatch.setitem(sys.modules, name, lacking)
    with pytest.raises(StartupError, match=rf"has no {name}:BlockPool\.\w+, which kvmig needs"):
        kind.check_names()


def test_functions_of_a_module_are_looked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.v1.worker.utils"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(StartupError, match=f"has no {name}:allocate_kv_cache, which kvmig needs"):
        kind.check_names()
    vars(module)["allocate_kv_cache"] = min
    kind.check_names()


def test_a_module_that_is_gone_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvmig.engines.vllm.config", None)
    with pytest.raises(StartupError, match=r"lacks what kvmig needs: .*config"):
        kind.VllmKind().load()


def test_the_environment_allows_an_untested_version(
    untested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(untested)
    with pytest.raises(StartupError, match="is not supported"):
        kind.check_version()
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    assert kind.check_version() == "0.99.0+cpu"
