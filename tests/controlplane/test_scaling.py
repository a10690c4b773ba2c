"""When instances are added or drained."""

from __future__ import annotations

from functools import cache, partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.scaling import InstanceScaler, ScaleIn, ScaleOut
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.core.config import ClusterConfig, ScalingConfig, check
from kvmig.core.errors import ConfigError
from tests.support import made_up_instances
from tests.support.examples import examples

CONFIG = ScalingConfig(low=10, high=60, max_instances=8, stabilization_s=5, cooldown_s=30)


instance = partial(made_up_instances.instance, total=851, reported_at=1e9)


def starting(name: str) -> InstanceView:
    return InstanceView(instance=name, endpoint="")


def decisions(
    scaler: InstanceScaler, seconds: int, *instances: InstanceView, since: int = 0
) -> list[object]:
    """(second, what) whenever something is decided."""
    made = ((now, scaler.decide(ClusterView(now, instances))) for now in range(since, seconds))
    return [(now, what) for now, what in made if what is not None]


def test_a_cluster_that_is_crowded_for_long_gets_as_many_as_it_lacks() -> None:
    three = [instance(name, 667, 50) for name in "abc"]
    assert decisions(InstanceScaler(CONFIG), 5, *three) == []
    assert decisions(InstanceScaler(CONFIG), 6, *three) == [(5, ScaleOut(2))]


def test_what_starts_counts_as_room() -> None:
    three = [instance(name, 667, 50) for name in "abc"]
    assert decisions(InstanceScaler(CONFIG), 100, *three, starting("d"), starting("e")) == []


def test_a_moment_inside_the_bounds_begins_the_wait_anew() -> None:
    scaler, crowded = InstanceScaler(CONFIG), instance("a", 800, 50)
    assert decisions(scaler, 4, crowded) == []
    assert decisions(scaler, 5, instance("a", 100, 50), since=4) == []
    assert decisions(scaler, 10, crowded, since=5) == []
    assert decisions(scaler, 11, crowded, since=10) == [(10, ScaleOut(1))]


def test_there_are_never_more_than_the_most() -> None:
    config = msgspec.structs.replace(CONFIG, max_instances=4)
    three = [instance(name, 851, 200) for name in "abc"]
    assert decisions(InstanceScaler(config), 6, *three) == [(5, ScaleOut(1))]
    assert decisions(InstanceScaler(config), 99, *three, starting("d")) == []


def test_after_the_cool_down_the_idlest_one_of_a_roomy_cluster_is_drained() -> None:
    scaler = InstanceScaler(CONFIG)
    three = instance("a", 10, 3), instance("b", 5, 1), instance("c", 9, 2)
    assert decisions(scaler, 60, *three) == [(30, ScaleIn("b"))]
    draining = instance("b", 5, 1, state="draining")
    assert decisions(scaler, 200, three[0], draining, three[2], since=60) == []


def test_an_idle_cluster_shrinks_to_the_least_and_no_further() -> None:
    assert decisions(InstanceScaler(CONFIG), 31, instance("a", 0, 0), instance("b", 0, 0))
    assert decisions(InstanceScaler(CONFIG), 500, instance("a", 0, 0)) == []


def test_none_is_drained_that_the_others_could_not_do_without() -> None:
    # 1702 - 160 free for 25: 61.7. Without one of them: 27.6, above low; with low 30 not.
    two = instance("a", 80, 12), instance("b", 80, 13)
    assert decisions(InstanceScaler(CONFIG), 31, *two) == [(30, ScaleIn("a"))]
    tight = msgspec.structs.replace(CONFIG, low=30.0)
    assert decisions(InstanceScaler(tight), 500, *two) == []


def test_too_few_instances_are_made_up_at_once() -> None:
    config = msgspec.structs.replace(CONFIG, min_instances=3)
    assert decisions(InstanceScaler(config), 1, instance("a", 0, 0)) == [(0, ScaleOut(2))]


def test_what_was_asked_for_is_not_asked_for_again_before_it_can_be_seen() -> None:
    config = msgspec.structs.replace(CONFIG, min_instances=3, stabilization_s=0)
    scaler, one = InstanceScaler(config), instance("a", 851, 200)
    assert decisions(scaler, 25, one) == [(0, ScaleOut(2)), (10, ScaleOut(2)), (20, ScaleOut(2))]
    assert decisions(scaler, 27, one, starting("b"), since=26) == [(26, ScaleOut(1))]


LOADS = st.lists(st.tuples(st.integers(0, 851), st.integers(0, 80)), min_size=1, max_size=6)


@examples(200)
@given(st.lists(LOADS, min_size=1, max_size=30))
def test_the_number_stays_within_bounds_and_a_round_does_one_thing(
    rounds: list[list[tuple[int, int]]],
) -> None:
    scaler = InstanceScaler(
        msgspec.structs.replace(CONFIG, min_instances=2, stabilization_s=2, cooldown_s=3)
    )
    for now, loads in enumerate(rounds):
        instances = tuple(instance(str(at), *load) for at, load in enumerate(loads))
        what = scaler.decide(ClusterView(now, instances))
        if isinstance(what, ScaleOut):
            assert 1 <= what.count <= 8 - len(loads)
        elif isinstance(what, ScaleIn):
            assert len(loads) > 2
            assert what.instance in {one.instance for one in instances}


@examples(30)
@given(requests=st.integers(0, 600), blocks=st.integers(1, 40), instances=st.integers(1, 8))
def test_a_constant_load_settles(requests: int, blocks: int, instances: int) -> None:
    scaler, count, changes = InstanceScaler(CONFIG), instances, list[int]()

    @cache
    def cluster(count: int) -> tuple[InstanceView, ...]:
        share = -(-requests // count)
        used = min(share * blocks, 851)
        return tuple(instance(str(at), used, share) for at in range(count))

    for now in range(1000):
        match scaler.decide(ClusterView(now, cluster(count))):
            case ScaleOut(more):
                count += more
                changes.append(now)
            case ScaleIn():
                count -= 1
                changes.append(now)
    assert not changes or changes[-1] < 400
    assert 1 <= count <= 8


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        (ScalingConfig(low=60, high=10), "--autoscale is 60,10, must be x,y with 0 <= x < y"),
        (ScalingConfig(low=-1), "--autoscale is -1,60"),
        (ScalingConfig(min_instances=0), "--min-instances is 0, must be 1 or more"),
        (
            ScalingConfig(min_instances=4, max_instances=3),
            "--max-instances is 3, must be at least --min-instances (4)",
        ),
        (ScalingConfig(min_instances=3), "--instances is 2, must be from --min-instances (3)"),
        (ScalingConfig(stabilization_s=-1), "--scale-stabilization is -1, must be 0 or more"),
        (ScalingConfig(cooldown_s=-1), "--scale-cooldown is -1, must be 0 or more"),
    ],
)
def test_bounds_that_can_not_be_kept_are_refused(scaling: ScalingConfig, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(ClusterConfig(instances=2, scaling=scaling))
    assert sentence in str(refused.value)
