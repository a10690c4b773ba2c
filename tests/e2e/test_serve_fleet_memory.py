"""What a fleet says of a model's memory before it starts is what its instance then takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.model_memory import once
from kvmig_tools.fleet import FleetUp
from tests.support.zoo import make

pytestmark = [pytest.mark.server, pytest.mark.long]


def test_what_a_model_took_at_its_first_start_is_what_it_takes_at_the_next(tmp_path: Path) -> None:
    llama, gemma = (make(family, tmp_path) for family in ("llama3", "gemma3"))
    with FleetUp(tmp_path) as fleet:
        first = once(fleet, "llama3", llama, "llama")
        other = once(fleet, "gemma3", gemma, "gemma")
        fleet.stop()
        fleet.start()
        again = once(fleet, "llama3", llama, "again")
    assert first["rest_basis"] == "assumed"
    assert other["rest_basis"].endswith(" with llama")
    assert again["rest_basis"].endswith(" with llama"), "the next server knows it"
    assert abs(again["off"]) < 0.1
