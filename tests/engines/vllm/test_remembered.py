"""What vLLM's application would remember in one of several front ends is refused at the start."""

from __future__ import annotations

import pytest

from kvmig.core.config import ClusterConfig, LifecycleConfig
from kvmig.core.errors import ConfigError
from kvmig.engines.vllm.kind import VllmKind
from kvmig.engines.vllm.remembered import refuse_remembered


@pytest.mark.parametrize(
    "name", ["VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_RESPONSES_API_STORE"]
)
def test_a_setting_that_one_front_end_would_remember_is_refused_with_several_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    several = ClusterConfig(lifecycle=LifecycleConfig(front_ends=2))
    with pytest.raises(ConfigError, match=rf"^{name} is '1', must be left out with --front-ends 2"):
        VllmKind().flags_for(["MODEL"], several)
    assert VllmKind().flags_for(["MODEL"], ClusterConfig()) == []


@pytest.mark.parametrize("word", ["--enable-server-load-tracking", "--enable_server_load_tracking"])
def test_a_route_that_knows_one_front_end_is_refused_with_several(word: str) -> None:
    with pytest.raises(ConfigError, match="use --front-ends 1"):
        refuse_remembered(3, {}, ["MODEL", word])
    refuse_remembered(1, {}, ["MODEL", word])


def test_routes_that_end_calls_of_all_front_ends_are_no_reason() -> None:
    refuse_remembered(3, {}, ["MODEL", "--enable-scale-out", "--tokens-only"])


@pytest.mark.parametrize("value", ["", "0", "false", "False"])
def test_a_setting_that_is_off_is_no_matter(value: str) -> None:
    refuse_remembered(2, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": value}, ["MODEL"])
