"""Policies in a closed loop with modelled engines: nothing swings to and fro."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.policy import POLICIES
from kvmig_tools.sim import cost
from kvmig_tools.sim.cluster import SimCluster
from kvmig_tools.sim.llumlet import SimLlumlet
from kvmig_tools.sim.outcomes import Outcomes
from kvmig_tools.sim.policies import setting
from kvmig_tools.sim.request import SimRequest
from kvmig_tools.sim.workloads import generate
from tests.support.examples import examples

KVMIG = POLICIES["kvmig"]
Moves = dict[str, list[tuple[float, bool]]]
"""When a request came somewhere by a migration, and whether with its KV, by its id."""


def watched(trace: str, rate: float, cv: float, seed: int, instances: int) -> SimCluster:
    requests = generate(trace, rate, count=150, cv=cv, seed=seed)
    model = cost.load("a10-llama7b")
    return SimCluster(requests, instances, model, KVMIG, setting("live"), Outcomes())


def moves_of(cluster: SimCluster) -> Moves:
    """Runs it."""
    moves: Moves = defaultdict(list)

    def came(llumlet: SimLlumlet, request: SimRequest) -> None:
        with_kv = request not in llumlet.engine.waiting
        moves[request.request_id].append((cluster.events.now, with_kv))
        SimLlumlet.arrived(llumlet, request)

    for llumlet in cluster.llumlets.values():
        setattr(llumlet, "arrived", partial(came, llumlet))  # noqa: B010 - a method
    cluster.run()
    return moves


@examples(15)
@given(
    trace=st.sampled_from(["ShareGPT", "L-L", "S-L", "M-M"]),
    load=st.floats(0.3, 1.5),
    cv=st.sampled_from([1.0, 4.0]),
    seed=st.integers(0, 1000),
    instances=st.integers(2, 5),
)
def test_no_request_moves_twice_within_its_cool_down_nor_its_kv_to_and_fro(
    trace: str, load: float, cv: float, seed: int, instances: int
) -> None:
    cluster = watched(trace, load * instances * 0.5, cv, seed, instances)
    for moves in moves_of(cluster).values():
        gaps = [after - before for (before, _), (after, _) in pairwise(moves)]
        assert all(gap >= KVMIG.victims.cooldown_s for gap in gaps)
        assert sum(with_kv for _, with_kv in moves) < 20


def test_a_draining_instance_is_empty_before_its_requests_would_have_ended() -> None:
    cluster = watched("S-L", 4.0, 1.0, 7, 4)
    emptied: list[float] = []

    def begin() -> None:
        cluster.llumlets["i1"].state = "draining"
        assert cluster.llumlets["i1"].here
        look()

    def look() -> None:
        if not cluster.llumlets["i1"].here:
            emptied.append(cluster.events.now)
        elif cluster.busy:
            cluster.events.after(0.1, look)

    cluster.events.at(15.0, begin)
    outcomes = cluster.run()
    assert outcomes.summary()["requests"] == 150
    assert emptied
    assert 15.0 < emptied[0] < 25.0
