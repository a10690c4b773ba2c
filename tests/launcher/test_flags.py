"""kvmig's own flags: what isn't said elsewhere of them."""

from __future__ import annotations

import pytest

from kvmig.core.errors import ConfigError
from kvmig.launcher.flags import parse


def test_an_instances_unit_goes_by_its_own_name_then_by_where_it_is_in_a_placement() -> None:
    flags = ["--unit=/run/u", "--unit=i1: /run/one", "--unit=left: /run/left", "--unit=0:1: /run/g"]
    unit = parse(["MODEL", *flags])[0].unit
    assert unit is not None
    asked = [("i0", ""), ("i0", "left"), ("i1", "left"), ("i2", "0:1"), ("i2", "right")]
    assert [unit.config_for(*one).path for one in asked] == [
        "/run/u", "/run/left", "/run/one", "/run/g", "/run/u",
    ]  # fmt: skip


@pytest.mark.parametrize("words", ["--data-parallel-size 3", "--data_parallel_size=3", "-dp 3"])
def test_data_parallel_ranks_are_instances(words: str) -> None:
    config, rest, _ = parse(["--instances=1", "M", *words.split()])

    assert (config.instances, rest) == (3, ["M"])


@pytest.mark.parametrize("flag", ["--enable-expert-parallel", "-ep"])
def test_ranks_that_would_share_experts_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size is 2, must be 1 with --enable-exp"):
        parse(["M", "-dp=2", flag])

    assert parse(["M", "--instances=2", flag])[0].instances == 2
