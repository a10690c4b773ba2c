"""What a fleet says of a model's memory before it starts is what its instance then takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.model_memory import once
from kvmig_tools.fleet import FleetUp
from tests.support.zoo import make

pytestmark = [pytest.mark.server, pytest.mark.long]


def test_what_one_family_took_of_the_host_says_what_another_one_takes(tmp_path: Path) -> None:
    with FleetUp(tmp_path) as fleet:
        first = once(fleet, "llama3", make("llama3", tmp_path))
        second = once(fleet, "gemma3", make("gemma3", tmp_path))
        fleet.stop()
        fleet.start()
        third = once(fleet, "gemma3", make("gemma3", tmp_path), name="again")
    assert first["rest_basis"] == "assumed"
    assert second["rest_basis"].endswith(" with llama3")
    assert third["rest_basis"].endswith(" with gemma3"), "the next server knows it"
    assert abs(second["off"]) < 0.1
    assert abs(third["off"]) < 0.1
