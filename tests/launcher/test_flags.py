"""kvmig's own flags: what isn't said elsewhere of them."""

from __future__ import annotations

from kvmig.launcher.flags import parse


def test_an_instances_unit_goes_by_its_own_name_then_by_where_it_is_in_a_placement() -> None:
    flags = ["--unit=/run/u", "--unit=i1: /run/one", "--unit=left: /run/left", "--unit=0:1: /run/g"]
    unit = parse(["MODEL", *flags])[0].unit
    assert unit is not None
    asked = [("i0", ""), ("i0", "left"), ("i1", "left"), ("i2", "0:1"), ("i2", "right")]
    assert [unit.config_for(*one).path for one in asked] == [
        "/run/u", "/run/left", "/run/one", "/run/g", "/run/u",
    ]  # fmt: skip
