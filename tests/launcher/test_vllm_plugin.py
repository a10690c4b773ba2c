"""`KVMIG=1 vllm serve`: the entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvmig import plugin
from kvmig.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
SERVER = """
import sys
before = set(sys.modules)
from kvmig.plugin import start
start()
own = sorted(name for name in set(sys.modules) - before if name.partition(".")[0] == "kvmig")
print("vLLM serves, beside", *own)
"""
"""A process that loads the plugin as vLLM's does, and then serves."""


def run_server(
    folder: Path, argv: list[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run it under the name `vllm`, with packages of `folder` before those that are installed."""
    program = folder / "vllm"
    program.write_text(SERVER)
    kept = {name: value for name, value in os.environ.items() if name != plugin.SWITCH}
    return subprocess.run(
        [sys.executable, str(program), *argv],
        env={**kept, "PYTHONPATH": f"{folder}:{ROOT}", **environment},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("environment", [{}, {"KVMIG": ""}, {"KVMIG": "0"}])
def test_without_the_variable_nothing_else_of_kvmig_is_imported(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    done = run_server(tmp_path, ["serve", "MODEL"], **environment)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "vLLM serves, beside kvmig kvmig.plugin\n"


def test_a_server_becomes_kvmigs_and_bad_flags_are_refused_by_name(tmp_path: Path) -> None:
    done = run_server(tmp_path, ["serve", "MODEL", "--data-parallel-size", "0"], KVMIG="1")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvmig: --instances is 0, must be 1 or more\n"


def test_with_an_untested_vllm_one_line_says_so_and_the_server_stays_vllms(tmp_path: Path) -> None:
    info = tmp_path / "vllm-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")

    done = run_server(tmp_path, ["serve", "MODEL"], KVMIG="1")

    assert done.returncode == 0
    assert done.stdout.startswith("vLLM serves")
    [said] = done.stderr.splitlines()
    assert said.startswith("kvmig: requests of this server can't move: vllm 9.9.9 is not supported")


def test_another_value_of_the_variable_is_refused(tmp_path: Path) -> None:
    done = run_server(tmp_path, ["serve", "MODEL"], KVMIG="yes")

    assert done.returncode == 1
    assert done.stderr == "KVMIG is 'yes', must be 1, or 0 for vLLM without kvmig\n"


def test_other_commands_of_vllm_stay_as_they_are(tmp_path: Path) -> None:
    done = run_server(tmp_path, ["bench", "serve"], KVMIG="1")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "vLLM serves, beside kvmig kvmig.plugin\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/bin/vllm", "serve", "M", "-dp", "2"], ["M", "-dp", "2"]),
        (["/lib/vllm/entrypoints/openai/api_server.py", "--model", "M"], ["--model", "M"]),
        (["vllm", "serve", "--help"], None),
        (["vllm", "serve", "M", "--help=all"], None),
        (["vllm", "bench", "serve"], None),
        (["vllm"], None),
        (["train.py", "serve", "M"], None),
        ([], None),
    ],
)
def test_only_the_command_line_of_a_server_counts(argv: list[str], words: list[str] | None) -> None:
    assert plugin.server_words(argv) == words


def test_one_engine_on_all_addresses_is_the_default_as_in_vllm() -> None:
    assert plugin.serve_words(["M", "--port=1"]) == [
        "--instances=1", "--host=0.0.0.0", "M", "--port=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "word",
    ["--enable-expert-parallel", "-ep", "--enable_expert_parallel", "--pipeline-parallel-size=2",
     "--pipe", "--kv-transfer-config.kv_connector", "--config"],
)  # fmt: skip
def test_what_may_keep_requests_where_they_are_is_judged_however_it_is_spelled(word: str) -> None:
    assert plugin.needs_verdict(["M", word])


@pytest.mark.parametrize(
    "words", [["M"], ["M", "-dp", "2", "--enforce-eager"], ["M", "--", "-", "--headless"]]
)
def test_other_command_lines_cost_no_second_parser(words: list[str]) -> None:
    assert not plugin.needs_verdict(words)


def test_a_server_whose_requests_stay_can_not_join_others() -> None:
    plugin.refuse_join("why", {})
    with pytest.raises(ConfigError, match="KVMIG_JOIN is unix:x, but requests of this server can"):
        plugin.refuse_join("why", {"KVMIG_JOIN": "unix:x"})


def test_what_the_server_starts_has_no_server_to_become_and_may_load_from_hubs() -> None:
    assert plugin.environment({"KVMIG": "1", "HOME": "/h", "HF_HUB_OFFLINE": "1"}) == {
        "HOME": "/h", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "0",
    }  # fmt: skip


def test_the_package_names_the_function_for_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["vllm.general_plugins"].items()

    assert name == "kvmig"
    assert EntryPoint(name, value, "vllm.general_plugins").load() is plugin.start
