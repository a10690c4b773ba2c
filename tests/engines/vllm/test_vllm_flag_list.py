"""Every flag of vLLM's is judged; those that mean another owner of the engines are refused."""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentParser, Namespace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvmig.core.errors import ConfigError
from kvmig.engines.vllm import flags
from kvmig.engines.vllm.compat import cli_args
from kvmig.engines.vllm.config import engine_config, refuse_settings
from kvmig.engines.vllm.embedded import EmbeddedVllm
from kvmig.engines.vllm.flags import ALLOWED, MEANS_NOTHING, NO_FLAGS, REFUSED
from kvmig.models import BUNDLED
from tests.support.environment import environment
from tests.support.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine

LOCKS = Path(flags.__file__).parent / "locks"


@cache
def parser() -> ArgumentParser:
    made: ArgumentParser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="kvmig.serve"))
    return made


def names() -> set[str]:
    """Of all flags, and of fields that have none."""
    fields = (*dataclasses.fields(AsyncEngineArgs), *dataclasses.fields(cli_args.FrontendArgs))
    return {one.name for one in fields} | {action.dest for action in parser()._actions} - {"help"}


def test_no_flag_is_unjudged() -> None:
    assert names() - ALLOWED - REFUSED.keys() - NO_FLAGS == set(), (
        "vLLM has new flags: put each into ALLOWED or REFUSED of kvmig/engines/vllm/flags.py"
    )


def test_none_is_judged_that_is_not_there() -> None:
    elsewhere = [json.loads(lock.read_text())["flags"] for lock in LOCKS.glob("*.json")]
    assert (ALLOWED | REFUSED.keys() | NO_FLAGS) - names().union(*elsewhere) == set()


def test_none_is_judged_twice() -> None:
    assert ALLOWED & REFUSED.keys() == set()
    assert NO_FLAGS & (ALLOWED | REFUSED.keys()) == set()
    assert MEANS_NOTHING.keys() <= REFUSED.keys()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--data-parallel-size=2", "--data-parallel-size 2 can't be used.*use --instances N"),
        ("--data-parallel-rank=0", "--data-parallel-rank 0 can't be used.*use --instances N"),
        ("--data-parallel-external-lb", "--data-parallel-external-lb can't.*KVMIG_JOIN to move"),
        ("--enable-elastic-ep", "--enable-elastic-ep can't be used.*use --instances N"),
        ("--scheduler-cls=a.B", "--scheduler-cls a.B can't be used.*leave it out"),
        (
            '--kv-transfer-config={"kv_role":"kv_both"}',
            "--kv-transfer-config can't.*use --transport",
        ),
        (
            "--kv-offloading-backend=lmcache",
            "--kv-offloading-backend lmcache can't be used.*native",
        ),
        ('--kv-events-config={"enable_kv_cache_events":true}', "--kv-events-config.*one port"),
        ("--pipeline-parallel-size=2", "--pipeline-parallel-size 2 .*--tensor-parallel-size"),
        ("--decode-context-parallel-size=2", "it spreads a block's tokens over workers"),
        ("--nnodes=3", "--nnodes 3 can't be used: an instance runs on its llumlet's host"),
        ("--distributed-executor-backend=ray", "--distributed-executor-backend ray.*leave it out"),
        ("--prefill-schedule-interval=4", "--prefill-schedule-interval 4 can't be used"),
        ("--api-server-count=2", "--api-server-count 2 can't be used: use --front-ends N"),
        ("--headless", "--headless can't be used: kvmig starts front end and instances"),
        ("--grpc", "--grpc can't be used"),
        ("--sleep-mode-offload-cudagraph", "--sleep-mode-offload-cudagraph can't be used.*parks"),
        ("--uds=/tmp/here", "--uds /tmp/here can't be used.*--host and --port"),
        ("--shutdown-timeout=5", "--shutdown-timeout 5 can't be used.*whole server's"),
    ],
)
def test_a_flag_for_another_owner_of_the_engines_is_refused_with_what_to_use(
    given: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        flags.parse([str(BUNDLED), given])


@pytest.mark.parametrize(
    "given",
    ["--distributed-executor-backend=mp", "--api-server-count=1", "--data-parallel-size=1"],
)
def test_one_that_says_what_is_so_anyway_is_taken(given: str) -> None:
    flags.parse([str(BUNDLED), given])


def test_a_flag_that_nobody_has_judged_is_refused_where_it_is_given() -> None:
    with pytest.raises(ConfigError, match="--a-new-flag 7 can't be used: kvmig doesn't know it"):
        flags.refuse_conflicts(Namespace(a_new_flag=7), lambda name: 1)
    flags.refuse_conflicts(Namespace(a_new_flag=1), lambda name: 1)


def test_a_query_is_not_kept_in_one_engine_for_documents_that_go_to_another() -> None:
    assert not flags.parse([str(BUNDLED)]).enable_flash_late_interaction


def test_vllms_own_offload_is_taken() -> None:
    with environment(ENVIRONMENT):
        flags.set_environment()
        config = engine_config(flags.parse([str(BUNDLED), "--kv-offloading-size=1"]))
        assert config.kv_transfer_config is not None
        assert config.kv_transfer_config.kv_connector == "OffloadingConnector"


def test_on_a_cpu_no_process_is_started_to_look_at_a_models_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
    registry._try_inspect_model_cls.cache_clear()
    # An engine that has run in this process lets vLLM read its environment no more.
    monkeypatch.setitem(vars(envs), "VLLM_CACHE_ROOT", str(tmp_path))
    with environment(ENVIRONMENT):
        flags.set_environment()
        engine_config(flags.parse([str(BUNDLED)]))
    assert [one.name for one in tmp_path.glob("modelinfos/*")] != []


def test_engines_in_ones_own_process_have_no_offload() -> None:
    transfer = SimpleNamespace(kv_connector="OffloadingConnector")
    with pytest.raises(ConfigError, match="--kv-offloading-size and --kv-transfer-config can't"):
        EmbeddedVllm(finished(kv_transfer_config=transfer))


@pytest.mark.parametrize("name", ["LMCacheMPConnector", "NixlPushConnector"])
def test_another_owner_of_kv_is_refused_by_what_vllm_makes_of_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_connector is {name}, must be OffloadingConnector"):
        refuse_settings(finished(kv_transfer_config=transfer_by(name)))


def test_a_connector_of_ones_own_by_a_known_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_connector is NixlConnector, must be"):
        refuse_settings(finished(kv_transfer_config=transfer_by("NixlConnector", "theirs")))
    refuse_settings(finished(kv_transfer_config=transfer_by("NixlConnector")))


def transfer_by(name: str, module: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module)


def finished(**of: Any) -> VllmConfig:
    """What is looked at of vLLM's finished configuration, all as it must be but for `of`."""
    sizes = ("data", "pipeline", "decode_context", "prefill_context")
    parallel = {f"{size}_parallel_size": 1 for size in sizes} | {"nnodes": 1}
    scheduler = {"scheduler_cls": None, "prefill_schedule_interval": 1}
    made = {
        "kv_transfer_config": None,
        "ec_transfer_config": None,
        "kv_events_config": None,
        "attention_config": SimpleNamespace(hisparse_config=of.pop("hisparse_config", None)),
        "parallel_config": SimpleNamespace(**{n: of.pop(n, v) for n, v in parallel.items()}),
        "scheduler_config": SimpleNamespace(**{n: of.pop(n, v) for n, v in scheduler.items()}),
    }
    return cast("VllmConfig", SimpleNamespace(**{**made, **of}))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("ec_transfer_config", "x", "vLLM's ec_transfer_config is set, must be none"),
        ("kv_events_config", "x", "vLLM's kv_events_config is set, must be none"),
        ("hisparse_config", "x", "vLLM's hisparse_config is set, must be none"),
        ("scheduler_cls", "a.B", "vLLM's scheduler_cls is set, must be none"),
        ("data_parallel_size", 2, "vLLM's data_parallel_size is 2, must be 1.*--instances N"),
        ("pipeline_parallel_size", 2, "vLLM's pipeline_parallel_size is 2, must be 1"),
        ("decode_context_parallel_size", 2, "vLLM's decode_context_parallel_size is 2"),
        ("prefill_context_parallel_size", 2, "vLLM's prefill_context_parallel_size is 2"),
        ("nnodes", 2, "vLLM's nnodes is 2, must be 1"),
        ("prefill_schedule_interval", 4, "vLLM's prefill_schedule_interval is 4, must be 1"),
    ],
)
def test_a_finished_configuration_that_can_not_hold_is_refused_however_it_came(
    name: str, value: object, sentence: str
) -> None:
    refuse_settings(finished())
    with pytest.raises(ConfigError, match=sentence):
        refuse_settings(finished(**{name: value}))


def test_every_flag_passes_the_check_that_does_without_vllm() -> None:
    every = {word for action in parser()._actions for word in action.option_strings}
    for word in sorted(every - {"--help", "-h"}):
        flags.check_words([str(BUNDLED), word, "a value"])
    flags.check_words([str(BUNDLED), "--compilation-config.mode", "3", "--max-model", "64"])
    flags.check_words([str(BUNDLED), "--disable-auto-tool-choice", "--no-disable-sliding-window"])
