"""What benchmarks know of kvmig by name: modules of processes, and flags of servers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from bench import (
    downtime,
    drain,
    fleet_soak,
    front_end_cost,
    hostile_calls,
    ledger,
    page_watch,
    plugin_soak,
    real,
    replace,
    rollout_gap,
    rollout_round,
    room,
    scale_down,
    site,
    soak,
    start,
)
from bench.chaos import cast
from bench.models import model_flags
from bench.units import site as unit_site
from kvmig.engines.registry import kind_of
from kvmig.launcher.flags import parse
from kvmig.models import BUNDLED

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

pytestmark = pytest.mark.engine  # it imports vLLM

MODULES = {
    *fleet_soak.PARTS,
    *page_watch.PARTS.values(),
    *room.STAY,
    *ledger.WORDS.values(),
    *cast.MODULES,
    start.INSTANCE,
}
WORDS = {"kvmig up", "llumlet"}
"""Of command lines, and no modules."""
SERVED: dict[str, Sequence[str]] = {
    "drain": drain.FLAGS,
    "downtime": [*site.SERVED_FLAGS, *downtime.FLAGS[2]],
    "front_end_cost": front_end_cost.FLAGS,
    "hostile_calls": hostile_calls.FLAGS,
    "real": real.FLAGS,
    "replace": [*replace.FLAGS, *replace.ALONE, *replace.SHARED],
    "rollout_gap": rollout_gap.FLAGS["vllm"],
    "rollout_round": [*rollout_round.FLAGS, *model_flags("device6ms-async")],
    "scale_down": scale_down.FLAGS,
    "soak": [*soak.FLAGS, *model_flags(soak.MODEL)],
    "units": unit_site.FLAGS,
}
TOYS: dict[str, Sequence[str]] = {
    "page_watch": page_watch.FLAGS,
    "rollout_gap": rollout_gap.FLAGS["toy"],
    "ledger": ledger.spec_of("toy")["flags"],
}


@pytest.mark.parametrize("name", sorted(word.strip() for word in MODULES - WORDS))
def test_a_process_is_known_by_a_module_that_exists(name: str) -> None:
    assert find_spec(name) is not None


@pytest.fixture(scope="module")
def vllm_parser() -> FlexibleArgumentParser:
    """vLLM's own, as kvmig asks it."""
    from kvmig.engines.vllm.flags import make_parser

    return make_parser()


@pytest.mark.parametrize("bench", SERVED)
def test_a_benchs_server_has_all_flags_that_it_is_given(
    bench: str, vllm_parser: FlexibleArgumentParser
) -> None:
    _, rest, _ = parse([str(BUNDLED), *SERVED[bench]])
    assert vllm_parser.parse_args(rest).model_tag == str(BUNDLED)


def test_vllms_own_server_has_all_flags_of_the_plugins_soak(
    vllm_parser: FlexibleArgumentParser,
) -> None:
    assert vllm_parser.parse_args([str(BUNDLED), *plugin_soak.FLAGS]).data_parallel_size == 2


@pytest.mark.parametrize("bench", TOYS)
def test_a_benchs_toys_have_all_flags_that_they_are_given(bench: str) -> None:
    _, rest, _ = parse(["/toy", "--engine=toy", *TOYS[bench]])
    assert kind_of("toy").parse(rest).model == "/toy"
