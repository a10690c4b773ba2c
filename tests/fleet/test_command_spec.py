"""Models whose servers are programs of other people: what their specification must say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmig.command.launch import decode_launch
from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import ConfigError
from kvmig.fleet.autoscale import one_less_holds
from kvmig.fleet.deployment_words import start_order
from kvmig.fleet.device_claims import KnownSizes, claim_of
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec, spec_of

GIB = 1 << 30


def given(**more: Any) -> dict[str, Any]:
    return {
        "name": "other",
        "source": f"path:{Path.cwd()}",
        "engine": "command",
        "command": f"{sys.executable} -m server {{model}} --port {{port}}",
        "memory": GIB,
        "share_prefixes": True,
        **more,
    }


def test_a_command_may_be_one_text_or_words() -> None:
    spec = spec_of(given())
    assert spec.command == (sys.executable, "-m", "server", "{model}", "--port", "{port}")
    assert spec_of(given(command=list(spec.command))) == spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


def test_a_model_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert spec_of(given(source=f"path:{file}")).folder == str(file)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"command": ""}, "model other: command is empty, must be a program"),
        ({"command": "no-such-program {port}"}, "'no-such-program', which is no program here"),
        ({"command": f"{sys.executable} {{prot}}"}, "has the field {prot}, must be one of model,"),
        ({"command": f"{sys.executable} 'a"}, "model other: command is"),
        ({"command": 5}, "command is 5, must be array"),
        ({"command": [sys.executable, "{port}", "\0"]}, "must be Unicode text without 0, at most"),
        ({"command": [sys.executable, "{port}", "x" * 70000]}, "at most 65536 bytes"),
        ({"served": "\ud800"}, "served has '\\ud800', must be Unicode text"),
        ({"source": "path:/no/such"}, "source is '/no/such', which is not here"),
        ({"memory": 0}, "memory is 0, must be the bytes of the host's memory"),
        ({"share_prefixes": False}, "share_prefixes is false, must be true with engine command"),
        ({"gpus": ["0"]}, "gpu_memory is 0, must be the bytes that an instance takes"),
        ({"flags": "--a"}, "flags is given, must be left out: command has its own"),
        ({"health": "health"}, "health is 'health', must be a path such as /health"),
        ({"hang_timeout_s": 0}, "hang_timeout_s is 0, must be 1 to 604800"),
        ({"pass_environment": ["a b"]}, "pass_environment has 'a b', must be names of environment"),
        ({"pass_environment": ["KVMIG_SECRET"]}, "'KVMIG_SECRET', which is the fleet's own"),
        ({"pass_environment": ["A"] * 101}, "pass_environment has 101 names, must have 100 at"),
        ({"warm": "parked"}, "warm is 'parked', must be none or always with command"),
        ({"instances": {"target_kind": "freeness"}}, "must be concurrency or rps with engine"),
        ({"unit": "u", "unit_memory": GIB}, "engine is command, must be vllm in a unit"),
        ({"adapters": {"a": "/"}}, "adapters is given, must be left out: command has none"),
    ],
)
def test_what_is_wrong_is_said_by_name(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec_of(given(**wrong))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        {"command": "a {port}"},
        {"health": "/v1/models"},
        {"served": "b"},
        {"pass_environment": ["HF_TOKEN"]},
    ],
)
def test_other_engines_have_no_fields_of_a_command(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        spec_of({"name": "a", "source": f"path:{Path.cwd()}", **more})
    assert f"{next(iter(more))} is given, must be left out: it is for engine command" in str(
        error.value
    )


def test_its_deployment_is_told_all_that_it_must_know() -> None:
    spec = spec_of(
        given(instances={"min": 2, "max": 3}, gpu_memory=GIB, pass_environment=["HF_TOKEN"])
    )
    settings = FleetSettings(data="/d", shutdown_timeout_s=7)
    order = start_order(spec, "abcd", settings, "note", (), None, [("0",), ("1", "2")])
    assert (order.program, order.engine, order.log) == ("command", "", "/d/logs/other.log")
    launch = decode_launch(order.words[0])
    assert launch.command == spec.command
    assert launch.pass_environment == ("HF_TOKEN",)
    assert (launch.model, launch.source, launch.instances) == ("other", str(Path.cwd()), 2)
    assert launch.gpus == {"i0": ("0",), "i1": ("1", "2")}
    assert (launch.uds, launch.spool) == ("/d/run/d-abcd.sock", "/d/spools/abcd")
    assert (launch.memory, launch.gpu_memory, launch.shutdown_timeout_s) == (GIB, GIB, 7)


def test_a_command_claims_of_gpus_what_its_user_says() -> None:
    assert claim_of(spec_of(given()), KnownSizes(), 80 * GIB) is None
    claim = claim_of(spec_of(given(gpu_memory=GIB)), KnownSizes(), 80 * GIB)
    assert claim is not None
    assert claim.each == GIB


def test_instances_without_blocks_can_be_fewer_whatever_runs() -> None:
    rows = [InstanceRow(id=name, state="serving", running=5) for name in ("i0", "i1")]
    assert one_less_holds(rows)
