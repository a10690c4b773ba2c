"""The number of front ends where nobody says it."""

from __future__ import annotations

import pytest

from kvmig import serve
from kvmig.core.config import ClusterConfig, LifecycleConfig, RayConfig
from kvmig.engines.vllm.kind import VllmKind
from kvmig.launcher.front_end_count import usual_front_ends


@pytest.mark.parametrize(
    ("cores", "gpus", "count"),
    [(64, 0, 1), (2, 0, 1), (2, 1, 1), (9, 1, 1), (10, 1, 2), (16, 1, 3), (96, 8, 4), (16, 8, 1)],
)
def test_there_are_several_where_gpus_leave_cores_for_them(
    cores: int, gpus: int, count: int
) -> None:
    assert usual_front_ends(cores, gpus) == count


def decided(config: ClusterConfig, kept: str = "") -> int:
    return serve.with_front_ends(config, kept).lifecycle.front_ends


def test_what_is_given_counts_and_what_an_engine_keeps_in_one_keeps_it_to_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "cores", lambda: 16)
    monkeypatch.setattr(serve, "gpus", lambda: ["0"])
    assert decided(ClusterConfig()) == 3
    assert decided(ClusterConfig(lifecycle=LifecycleConfig(front_ends=7))) == 7
    assert decided(ClusterConfig(ray=RayConfig())) == 1
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    assert (
        decided(ClusterConfig(), VllmKind().needs_one_front_end(["--enable-server-load-tracking"]))
        == 1
    )
    said = capsys.readouterr().err
    assert (
        "one front end instead of 3: VLLM_ENABLE_RESPONSES_API_STORE is '1', --enable-server-"
        in said
    )
