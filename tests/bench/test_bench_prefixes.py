"""Dispatch by prefixes beside others' rules: bench.prefixes."""

from __future__ import annotations

import numpy as np
from numpy.random import RandomState

from bench import prefixes
from bench.prefixes import LOADS, PrefixLoad, conversations, simulate
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.engines.base import EngineLoad


def view(*requests: int, waiting: int = 0) -> ClusterView:
    rows = [
        InstanceView(
            instance=f"i{number}", endpoint="", state="serving", reported_at=0.0,
            load=EngineLoad(1000, 10 * count, count, waiting * (number == 0), 0, 0),
            virtual_blocks=10.0 * count,
        )
        for number, count in enumerate(requests)
    ]  # fmt: skip
    return ClusterView(0.5, rows)


def test_sglangs_rule_takes_the_shortest_queue_where_loads_differ_much() -> None:
    held = np.array([0.0, 90.0])
    assert prefixes.sglang(view(10, 60), held, 100.0).argmax() == 1
    assert prefixes.sglang(view(10, 90), held, 100.0).argmax() == 0
    assert prefixes.sglang(view(10, 60), held / 9, 100.0).argmax() == 0, "a hit of a tenth is none"


def test_llm_ds_scorers_weigh_prefix_queue_and_memory() -> None:
    scores = prefixes.llm_d(view(10, 10, waiting=4), np.array([100.0, 0.0]), 100.0)
    assert scores.tolist() == [3 + 0 + 1.8, 0 + 2 + 1.8]


def test_a_turn_comes_back_with_all_that_was_said_before() -> None:
    turns = conversations(PrefixLoad("", "turns", 5.0), 300, RandomState(1))
    by_name: dict[str, list[int]] = {}
    for one in turns:
        said = by_name.setdefault(one.prefix, [])
        assert one.prefix_tokens == (said[-1] if said else 0)
        said.append(one.final_tokens)
    assert max(map(len, by_name.values())) > 3


def test_what_is_held_is_found_again() -> None:
    load = LOADS[5]
    with_prefixes, without = (
        simulate((name, load, 300, 1)) for name in ("kvmig", "kvmig without prefixes")
    )
    assert with_prefixes.hit_share > 2 * without.hit_share
    assert with_prefixes.figures["ttft_p50_s"] < without.figures["ttft_p50_s"]
