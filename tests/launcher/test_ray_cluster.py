"""What instances take of Ray's nodes: read, checked against the nodes, and passed on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.launcher.ray_cluster import (
    RayNode,
    actor_options,
    check_room,
    check_sizes,
    share_of,
)
from kvmig.launcher.ray_resources import needs_of, parse_resources


def node(free: dict[str, float], total: dict[str, float] | None = None) -> RayNode:
    return RayNode("n", "198.18.77.1", total or free, free)


def test_resources_are_read_from_json() -> None:
    assert parse_resources('{"CPU": 2, "fast": 0.5}') == {"CPU": 2.0, "fast": 0.5}
    assert parse_resources("") == {}


@pytest.mark.parametrize(
    "text",
    ["CPU", "2", '["CPU"]', "{}", '{"CPU": 0}', '{"CPU": -1}', '{"CPU": "2"}', '{"": 1}',
     '{"CPU": null}', '{"GPU": NaN}'],
)  # fmt: skip
def test_what_is_no_object_of_amounts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--ray-resources is .*, must be a JSON object"):
        parse_resources(text)


def test_above_one_gpus_are_whole() -> None:
    assert parse_resources('{"GPU": 0.5}') == {"GPU": 0.5}
    with pytest.raises(ConfigError, match="GPU above 1 must be whole"):
        parse_resources('{"GPU": 1.5}')


def test_without_resources_a_worker_takes_a_gpu() -> None:
    assert needs_of({}, 2) == {"GPU": 2.0}
    assert needs_of({"CPU": 3.0}, 2) == {"CPU": 3.0}


def test_instances_that_fit_on_the_nodes_together_pass() -> None:
    check_room([node({"GPU": 2}), node({"GPU": 1})], [{"GPU": 1.0}, {"GPU": 2.0}])


def test_a_small_instance_does_not_take_a_large_ones_only_place() -> None:
    check_room([node({"GPU": 4}), node({"GPU": 1})], [{"GPU": 1.0}, {"GPU": 4.0}])


def test_one_instance_too_many_is_counted() -> None:
    with pytest.raises(ConfigError, match="room for 2 of 3 instances with 1 GPU each"):
        check_room([node({"GPU": 2})], [{"GPU": 1.0}] * 3)


def test_what_others_have_taken_is_no_room() -> None:
    with pytest.raises(ConfigError, match="room for 0 of 1 instances"):
        check_room([node({"GPU": 0}, {"GPU": 2})], [{"GPU": 1.0}])


def test_an_instance_larger_than_any_node_is_told_from_a_full_cluster() -> None:
    with pytest.raises(ConfigError, match=r"needs 4 GPU, but the largest node .* has 2 GPU"):
        check_sizes([node({"GPU": 2}), node({"GPU": 2})], [{"GPU": 4.0}])


def test_an_unknown_resource_is_named_with_those_that_there_are() -> None:
    nodes = [node({"CPU": 2, "node:1": 1, "object_store_memory": 9})]
    with pytest.raises(ConfigError, match="has no GPU, only CPU: name what an instance takes"):
        check_sizes(nodes, [{"GPU": 1.0}])


def test_an_instances_share_of_a_node_is_of_what_it_takes_most_of() -> None:
    assert share_of({"CPU": 2, "GPU": 1}, {"CPU": 8, "GPU": 2, "memory": 1e9}) == 0.5
    assert share_of({"slot": 1}, {"CPU": 8}) == 1.0


def test_ray_hears_of_cpus_gpus_memory_and_the_rest() -> None:
    options = actor_options({"CPU": 1.0, "memory": 1e9, "fast": 2.0})
    assert options == {"num_cpus": 1, "num_gpus": 0, "memory": 10**9, "resources": {"fast": 2.0}}
    assert actor_options({"GPU": 1.0})["resources"] is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 20))
def test_instances_that_are_alike_pass_exactly_if_they_fit(gpus: list[int], count: int) -> None:
    nodes = [node({"GPU": float(number)}) for number in gpus]
    if count <= sum(gpus):
        check_room(nodes, [{"GPU": 1.0}] * count)
    else:
        with pytest.raises(ConfigError, match=f"room for {sum(gpus)} of {count}"):
            check_room(nodes, [{"GPU": 1.0}] * count)
