"""What becomes of each kind of `vllm serve` under the plugin, by vLLM's own parser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvmig import plugin
from kvmig.core.errors import ConfigError
from kvmig.engines.vllm.verdict import ServingVerdict, with_file
from kvmig.launcher import flags as kvmig_flags
from kvmig_tools.plugin_entry import entry_point

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
MODEL = "MODEL"
RANKS = ("--data-parallel-size", "2")
DRAFTS = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3}
TIMEOUT_S = 240.0


def connector(name: str, module: str | None = None) -> str:
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": module}
    return f"--kv-transfer-config={json.dumps(config)}"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--enable-lora", "--lora-modules", "a=/a"),
        ("--enable-auto-tool-choice", "--tool-call-parser=hermes"),
        ("--enable-sleep-mode",),
        ("--api-server-count", "2"),
        ("-asc", "2"),
        ("--tensor-parallel-size", "2"),
        ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "1"),
        (f"--speculative-config={json.dumps(DRAFTS)}",),
        ("--kv-offloading-size", "1"),
        ("--kv-offloading-size", "1", "--kv-offloading-backend", "native"),
        ("--policy", "none", "--front-ends", "2"),
        (connector("NixlConnector"),),
        (connector("NixlPullConnector"),),
        (connector("ExampleConnector"),),
    ],
)
def test_requests_move_between_ranks_with(words: tuple[str, ...]) -> None:
    assert plugin.judge([MODEL, *RANKS, *words]) == ServingVerdict("moves")


def test_requests_of_one_engine_that_spreads_experts_over_its_workers_move() -> None:
    words = [MODEL, "--enable-expert-parallel", "--tensor-parallel-size=2"]
    assert plugin.judge(words) == ServingVerdict("moves")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--enable-expert-parallel",), "--enable-expert-parallel with --data-parallel-size 2: "),
        (("-ep", "--headless"), "--enable-expert-parallel with --data-parallel-size 2: ranks that"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size 2: each stage has a part"),
        (("-pp", "2"), "--pipeline-parallel-size 2: "),
        (("--decode-context-parallel-size", "2"), "--decode-context-parallel-size 2: "),
        (
            (connector("NixlPushConnector"),),
            "--kv-transfer-config with NixlPushConnector: a KV connector",
        ),
        ((connector("ExampleConnector", module="theirs"),), "--kv-transfer-config with Example"),
        ((connector("LMCacheConnectorV1"),), "--kv-transfer-config with LMCacheConnectorV1: "),
        (
            ("--kv-offloading-size", "1", "--kv-offloading-backend", "lmcache"),
            "--kv-offloading-backend lmcache: a KV connector that can't be informed",
        ),
    ],
)
def test_requests_stay_and_the_server_is_vllms_with(words: tuple[str, ...], why: str) -> None:
    verdict = plugin.judge([MODEL, *RANKS, *words])

    assert verdict.what == "stays"
    assert verdict.why.startswith(why)
    assert "\n" not in verdict.why


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--headless",), "--headless can't be used: .*KVMIG_JOIN to move requests between hosts"),
        (("--data-parallel-hybrid-lb",), "--data-parallel-hybrid-lb can't be used: .*KVMIG_JOIN"),
        (
            ("--data-parallel-external-lb",),
            "--data-parallel-external-lb can't be used: .*each host",
        ),
        (("--data-parallel-rank", "0"), "--data-parallel-rank 0 can't be used: .*each host"),
        (("--data-parallel-address", "10.0.0.1"), "--data-parallel-address 10.0.0.1 can't be used"),
        ((connector("OffloadingConnector"),), "--kv-transfer-config can't.*--kv-offloading-size"),
        (("--nnodes", "2"), "--nnodes 2 can't be used"),
        (
            ("-ep", "--policy", "none"),
            "ranks that share experts.*vLLM without kvmig refuses the other flags: .*--policy",
        ),
    ],
)
def test_a_server_is_refused_by_name_with(words: tuple[str, ...], why: str) -> None:
    verdict = plugin.judge([MODEL, *RANKS, *words])

    assert verdict.what == "refused"
    assert re.search(why, verdict.why), verdict.why


def test_what_vllms_parser_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline-parallel-size is 'two', must be a whole"):
        plugin.judge([MODEL, "--pipeline-parallel-size", "two"])


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_server_needs_one_http_process_or_more(number: str) -> None:
    with pytest.raises(ConfigError, match=rf"--api-server-count.*'{number}' must be 1 or more"):
        kvmig_flags.parse([f"--api-server-count={number}"])


def test_http_processes_have_vllms_name_too() -> None:
    config, rest, _ = kvmig_flags.parse(["--api-server-count", "3"])

    assert (config.lifecycle.front_ends, rest) == (3, [])


@pytest.fixture
def flags_file(tmp_path: Path) -> str:
    """Flags of vLLM's and of kvmig's."""
    file = tmp_path / "flags.yaml"
    file.write_text("data-parallel-size: 4\napi-server-count: 2\npolicy: none\nhost: 10.0.0.1\n")
    return str(file)


@pytest.mark.parametrize("model", [[MODEL], []])
def test_a_file_of_flags_counts_as_if_they_were_given_first(
    flags_file: str, model: list[str]
) -> None:
    words = with_file([*model, "--port=1", "--config", flags_file, "--policy=kvmig"])
    config, rest, _ = kvmig_flags.parse(plugin.serve_words(words))

    assert words[: len(model)] == model
    assert (config.instances, config.lifecycle.front_ends) == (4, 2)
    assert config.scheduler.policy == "kvmig"
    assert rest == ["--host=0.0.0.0", *model, "--host", "10.0.0.1", "--port=1"]


def test_a_file_of_flags_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vLLM's flags can't be read: .*none.yaml"):
        with_file([MODEL, "--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize("words", [["--config"], ["--config", "a.yaml", "--config", "b.yaml"]])
def test_one_file_of_flags_is_read(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--config is given . times, must name one file, once"):
        with_file([MODEL, *words])


SERVER = """
import os, sys
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
from vllm.entrypoints.openai import api_server
from vllm.utils.argparse_utils import FlexibleArgumentParser
from kvmig.engines.vllm.compat import cli_args
sys.argv = [api_server.__file__, *sys.argv[1:]]
args = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args()
print("vLLM serves", args.pipeline_parallel_size)
"""
"""vLLM's server up to where it has read its flags, with the plugin of the folder's entry point."""


def run_server(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVMIG": "1", "PYTHONPATH": f"{entry_point(folder)}:{ROOT}"}
    return subprocess.run(
        [sys.executable, "-c", SERVER, *words],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_a_server_whose_requests_stay_goes_on_as_vllms_and_says_so_once(tmp_path: Path) -> None:
    done = run_server(tmp_path, "--model", MODEL, "--pipeline-parallel-size", "2")

    assert (done.returncode, done.stdout) == (0, "vLLM serves 2\n"), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("kvmig: ")]
    assert said == [
        "kvmig: requests of this server can't move: --pipeline-parallel-size 2: each stage has a"
        " part of a request's KV cache"
    ]


@pytest.mark.long
def test_a_server_is_refused_at_the_door_before_anything_starts(tmp_path: Path) -> None:
    done = run_server(tmp_path, "--model", MODEL, connector("OffloadingConnector"))

    assert (done.returncode, done.stdout) == (2, "")
    assert "kvmig: --kv-transfer-config can't be used: " in done.stderr
