"""Flags that only some instances get, and what the instances can exchange then."""

from __future__ import annotations

from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.launcher.shapes import (
    EngineTrees,
    InstanceShape,
    InstanceShapes,
    own_flags,
    own_gpus,
    own_nodes,
    own_trees,
    own_units,
    shapes_of,
    unit_tokens,
)

NODE = 14 * "01ab"
"""An id as Ray makes it."""


def parse(argv: list[str]) -> Namespace:
    """As vLLM does, for two flags; the last one counts."""
    found = dict(word.lstrip("-").split("=") for word in argv[1:])
    block = found.get("block-size")
    return Namespace(
        tensor_parallel_size=int(found.get("tensor-parallel-size", 1)),
        block_size=None if block is None else int(block),
    )


def test_an_instances_own_flags_stand_behind_those_for_all() -> None:
    own = own_flags(["i1: --tensor-parallel-size=2", "i1:--block-size=64"], 3)

    for_all = ["MODEL", "--block-size=32"]

    shapes = shapes_of(parse(for_all), for_all, own, 3, parse)

    changed = InstanceShape(("--tensor-parallel-size=2", "--block-size=64"), 2, 64)
    assert shapes == [InstanceShape((), 1, 32), changed, InstanceShape((), 1, 32)]


def test_a_flag_with_spaces_is_quoted_as_in_a_shell() -> None:
    assert own_flags(["i0: --served-model-name 'a b'"], 1) == {"i0": ("--served-model-name", "a b")}


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ("i2: --block-size=64", "must be one of i0, i1, a colon and flags"),
        ("--block-size=64", "--instance-flags is '--block-size=64'"),
        ("i0: 'open", "No closing quotation"),
    ],
)
def test_flags_for_no_instance_are_refused(given_: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        own_flags([given_], 2)


def test_instances_that_are_alike_exchange_whole_blocks() -> None:
    assert unit_tokens([InstanceShape((), 2, 64)] * 3) == 0
    assert unit_tokens([InstanceShape()]) == 0


def test_a_block_size_that_vllm_chooses_is_a_multiple_of_the_usual_one() -> None:
    assert unit_tokens([InstanceShape((), 1, 64), InstanceShape((), 1, None)]) == 16


def test_another_number_of_workers_alone_makes_units_needed() -> None:
    assert unit_tokens([InstanceShape((), 1, 64), InstanceShape((), 2, 64)]) == 64


@given(st.lists(st.integers(1, 16), min_size=2, unique=True))
def test_a_unit_fills_every_instances_blocks(sizes: list[int]) -> None:
    unit = unit_tokens([InstanceShape((), 1, size * 16) for size in sizes])

    assert unit >= 16
    assert not any(size * 16 % unit for size in sizes)


def test_an_instance_has_a_build_of_the_engine_of_its_own() -> None:
    trees = own_trees(["i1: /new"], 2, lambda folder: "0.33.0")

    assert [trees.tree_of(name) for name in ("i0", "i1", "i2")] == ["", "/new", ""]


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ("i2: /new", "--instance-vllm is 'i2: /new', must be one of i0, i1, a colon and a folder"),
        ("i1: /none", "--instance-vllm is 'i1: /none': there is none"),
    ],
)
def test_a_build_that_no_instance_can_be_is_refused(given_: str, named: str) -> None:
    def check(folder: str) -> str:
        raise ConfigError("there is none")

    with pytest.raises(ConfigError, match=named):
        own_trees([given_], 2, check)


def test_instances_are_named_a_place_each() -> None:
    assert own_units(["i1: east", "i0:west"], 2) == {"i0": "west", "i1": "east"}


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ("i2: east", "--instance-unit is 'i2: east', must be one of i0, i1, a colon and a name"),
        ("i1:", "--instance-unit is 'i1: ', its name must have 1 to 200 characters"),
        ("i1: " + 201 * "x", "its name must have 1 to 200 characters"),
    ],
)
def test_a_place_that_no_instance_can_have_is_refused(given_: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        own_units([given_], 2)


def test_instances_are_given_their_gpus() -> None:
    assert own_gpus(["i1: 2, GPU-3", "i0:0"], 2) == {"i0": ("0",), "i1": ("2", "GPU-3")}


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ("i2: 0", "--instance-gpus is 'i2: 0', must be one of i0, i1, a colon and ids of GPUs"),
        ("i1: 0,0", "--instance-gpus is 'i1: 0,0', must have ids of different GPUs"),
        ("i1: 0,", "must have ids of different GPUs"),
    ],
)
def test_gpus_that_no_instance_can_have_are_refused(given_: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        own_gpus([given_], 2)


def test_an_instance_with_more_workers_comes_later_only_where_shapes_may_be_mixed() -> None:
    argv = ["MODEL", "--block-size=32"]
    started = shapes_of(parse(argv), argv, {}, 2, parse)
    assert unit_tokens(started) == 0
    assert unit_tokens(started, mixed=True) == 32
    alike = InstanceShapes(argv, {}, started, 0, parse)
    with pytest.raises(ConfigError, match="with 2 workers, must be 32 with 1 workers"):
        alike.shape_of("i2", "--tensor-parallel-size=2")
    mixed = InstanceShapes(argv, {}, started, 32, parse)
    assert mixed.shape_of("i2", "--tensor-parallel-size=2").workers == 2


def test_instances_are_given_their_nodes() -> None:
    assert own_nodes([f"i1: {NODE}"], 2) == {"i1": NODE}


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        (f"i2: {NODE}", "must be one of i0, i1, a colon and a node's id"),
        ("i1: 10.0.0.1", "is '10.0.0.1', must be the 56 hexadecimal digits of a node"),
        ("i1:", "is '', must be the 56 hexadecimal digits of a node"),
    ],
)
def test_a_node_that_ray_can_not_have_is_refused(given_: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        own_nodes([given_], 2)


def test_a_build_for_all_goes_before_those_that_some_had() -> None:
    some = EngineTrees().after("/new", ["i1"])

    assert [some.tree_of(name) for name in ("i0", "i1")] == ["", "/new"]
    assert some.after("/newest", ()) == EngineTrees("/newest")
