from __future__ import annotations

from bench.worker_placement import CASES, history_mib, make_site, measure_site


def test_the_workers_hold_no_more_than_they_have() -> None:
    site = make_site(9, 20, seed=1)
    assert {len(node.devices) for node in site.nodes} == {8, 4, 0}
    for node in site.nodes:
        assert all(gpu.free == gpu.total - sum(gpu.claims.values()) for gpu in node.devices)
    assert sum(len(node.instances) for node in site.nodes) > 0


def test_each_kind_of_decision_is_timed() -> None:
    found = measure_site(10, 1, seed=10)
    assert {*CASES, "instances_move", "each_of_200_at_once"} == set(found)
    assert all(spent > 0 for times in found.values() for spent in times)


def test_the_memory_of_the_reasons_is_measured_with_their_rows() -> None:
    size, rows = history_mib(10, 5, seed=0)
    assert rows == 50
    assert size > 0
