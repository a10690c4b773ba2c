"""Which models share which GPUs: the estimator, Algorithm 1, the search."""

from __future__ import annotations

import time
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.mux.systems import power_law
from kvmig.core.errors import ConfigError
from kvmig.placement.estimator import ExpectedLoad, PlanEstimator
from kvmig.placement.greedy import UnplacedMember, best_of_groups, place, used
from kvmig.placement.meshes import groups, neighbours, packs
from kvmig.placement.problem import (
    GpuUnit,
    ModelLoad,
    Objective,
    PlacedInstance,
    Plan,
    check,
    cluster_of,
    models_of,
)
from kvmig.placement.search import search
from kvmig.placement.step_costs import StepCost
from tests.support.examples import examples
from tests.support.placement_cases import best_value, small_case


def whole(models: list[ModelLoad]) -> list[PlacedInstance]:
    return [PlacedInstance(at, one.rate) for at, one in enumerate(models)]


def estimator(models: list[ModelLoad], cluster: str = "1x8:a100-80g") -> PlanEstimator:
    return PlanEstimator(models, cluster_of(cluster))


def plan(found: Plan | UnplacedMember) -> Plan:
    assert not isinstance(found, UnplacedMember)
    return found


# -- meshes


def test_a_cluster_of_4_nodes_has_165_groups_of_meshes() -> None:
    assert len(groups(1, 8)) == 10
    assert len(groups(4, 8)) == 165
    assert all(sum(one) == 32 for one in groups(4, 8))


@given(nodes=st.integers(1, 3), gpus=st.integers(1, 8))
def test_every_group_of_meshes_lies_in_the_nodes(nodes: int, gpus: int) -> None:
    for one in groups(nodes, gpus):
        assert sum(one) == nodes * gpus
        assert packs(one, nodes, gpus)


def test_units_dont_lie_across_nodes() -> None:
    assert not packs([4, 4, 4], 2, 6)
    assert packs([4, 4, 2, 2], 2, 6)
    assert neighbours((4, 2, 2)) == [(4, 2, 1, 1), (2, 2, 2, 2)]


# -- equation 3


loads = st.lists(
    st.tuples(st.sampled_from(["llama-7b", "llama-13b"]), st.floats(0.01, 30)),
    min_size=1,
    max_size=4,
)


@examples(60)
@given(loads=loads, gpus=st.sampled_from([1, 2, 4, 8]))
def test_what_is_expected_satisfies_equation_3(loads: list[tuple[str, float]], gpus: int) -> None:
    """A request takes its decode steps and all members' prompts that come meanwhile."""
    models = [ModelLoad(f"m{at}", kind, rate) for at, (kind, rate) in enumerate(loads)]
    it = estimator(models)
    unit = GpuUnit(gpus, tuple(whole(models)))
    expected = it.unit(unit)
    if expected is None:
        assert it.left_bytes(unit) < 0
        return
    steps = [cost(one, gpus)[0].decode_s(0, 0, two.share)
             for one, two in zip(models, expected, strict=True)]  # fmt: skip
    drain = max(steps) / 2 if len(models) > 1 else 0.0
    pairs = list(zip(expected, models, strict=True))
    busy = sum(one.throughput * (prefill_s(model, gpus) + drain) for one, model in pairs)
    for one, model in pairs:
        decode = decode_s(one, model, gpus)
        assert one.latency_s == pytest.approx(one.latency_s * busy + decode)
        assert one.batch == pytest.approx(one.throughput * one.latency_s)  # Little
        room = one.kv_bytes / cost(model, gpus)[1] / model.tokens
        full = one.batch == pytest.approx(max(1, min(256, room)))
        assert full or one.throughput == pytest.approx(model.rate)


def cost(model: ModelLoad, gpus: int) -> tuple[StepCost, int]:
    known = cluster_of("1x8:a100-80g").device.models[model.model]
    return known.tp[str(gpus)], known.token_bytes


def prefill_s(model: ModelLoad, gpus: int) -> float:
    return cost(model, gpus)[0].prefill_s(model.prompt_tokens, model.prompt_tokens**2, 1.0)


def decode_s(one: ExpectedLoad, model: ModelLoad, gpus: int) -> float:
    step = cost(model, gpus)[0].decode_s(one.batch, one.batch * model.context, one.share)
    return model.output_tokens * step


def test_a_model_alone_does_what_was_measured_of_it() -> None:
    """Figure 5's hottest 7B did 8.9 requests/s on one GPU (spatial), 25.1 on 8 (MuxServe)."""
    it = estimator([ModelLoad("a", "llama-7b", 50)])
    one, eight = (it.unit(GpuUnit(gpus, (PlacedInstance(0, 50.0),))) for gpus in (1, 8))
    assert one is not None
    assert one[0].throughput == pytest.approx(8.9, rel=0.1)
    assert eight is not None
    assert eight[0].throughput == pytest.approx(25.1, rel=0.1)


def test_outputs_of_many_lengths_hold_more_context_than_equal_ones() -> None:
    rates = []
    for cv in (0.0, 1.0):
        it = estimator([ModelLoad("a", "llama-7b", 50, output_cv=cv)])
        expected = it.unit(GpuUnit(1, (PlacedInstance(0, 50.0),)))
        assert expected is not None
        rates.append(expected[0].throughput)
    assert rates[1] < 0.9 * rates[0]


def test_a_share_is_the_least_that_carries_the_rate() -> None:
    it = estimator([ModelLoad("a", "llama-7b", 50)])
    shares = [it.share(PlacedInstance(0, rate), 1) for rate in (0.5, 4.0, 7.0, 50.0)]
    assert shares == sorted(shares, key=lambda one: one or 0)
    assert shares[0] == 0.3
    assert shares[-1] == 0.9
    assert it.share(PlacedInstance(0, 1.0), 16) is None  # nobody measured that


# -- Algorithm 1 and the search beside all that is possible


@pytest.mark.parametrize("seed", range(12))
def test_algorithm_1_comes_within_5_percent_of_the_best_placement(seed: int) -> None:
    models = small_case(seed)
    it = estimator(models)
    found = it.total(plan(best_of_groups(it, whole(models))))
    assert found >= 0.95 * best_value(it, whole(models))


@pytest.mark.parametrize("objective", ["paper", "requests", "slo"])
@pytest.mark.parametrize("seed", range(4))
def test_the_search_comes_within_1_percent_of_the_best_with_and_without_replicas(
    seed: int, objective: str
) -> None:
    models = small_case(seed)[:3]
    it = PlanEstimator(models, cluster_of("1x4:a100-80g"), cast("Objective", objective))
    found = it.total(plan(search(it)))
    assert found >= 0.99 * best_value(it, whole(models))
    halves = [PlacedInstance(at, one.rate / 2) for at, one in enumerate(models) for _ in range(2)]
    assert found >= 0.99 * best_value(it, halves)


@examples(20)
@given(
    rates=st.lists(st.floats(0.01, 40), min_size=1, max_size=5),
    objective=st.sampled_from(["paper", "requests", "slo"]),
)
def test_a_plan_places_every_model_with_its_whole_rate(rates: list[float], objective: str) -> None:
    models = [ModelLoad(f"m{at}", "llama-7b", rate) for at, rate in enumerate(rates)]
    it = PlanEstimator(models, cluster_of("2x4:a100-80g"), cast("Objective", objective))
    found = plan(search(it, evaluations=2000))
    assert packs([one.gpus for one in found], 2, 4)
    for at, model in enumerate(models):
        parts = [one.rate for unit in found for one in unit.members if one.llm == at]
        assert sum(parts) == pytest.approx(model.rate)
    assert all(it.unit(one) is not None for one in found)


def test_the_search_replicates_what_one_unit_cant_carry() -> None:
    models = power_law(2.1, 50)
    it = estimator(models, "4x8:a100-80g")
    greedy = plan(best_of_groups(it, whole(models)))
    found = plan(search(it))
    assert sum(one.llm == 0 for unit in greedy for one in unit.members) == 1
    assert sum(one.llm == 0 for unit in found for one in unit.members) >= 5
    assert it.total(found) >= 1.4 * it.total(greedy)


def test_the_same_input_gives_the_same_plan() -> None:
    models = power_law(1.3, 30)
    plans = [
        search(PlanEstimator(models, cluster_of("2x8:a100-80g"), "slo"), 1000) for _ in range(2)
    ]
    assert plans[0] == plans[1]


def test_ties_go_to_fewer_gpus() -> None:
    it = estimator([ModelLoad("a", "llama-7b", 0.1)])
    assert used(plan(best_of_groups(it, [PlacedInstance(0, 0.1)]))) == 1


@pytest.mark.long
def test_32_gpus_are_placed_in_10_seconds_of_a_core() -> None:
    models = power_law(0.7, 50)
    began = time.process_time()
    search(PlanEstimator(models, cluster_of("4x8:a100-80g"), "slo"))
    assert time.process_time() - began < 10


@pytest.mark.long
def test_128_gpus_are_placed_in_60_seconds_of_a_core() -> None:
    kinds = ["llama-7b"] * 40 + ["llama-13b"] * 14 + ["llama-30b"] * 6 + ["llama-65b"] * 4
    models = power_law(0.9, 60, kinds)
    began = time.process_time()
    search(PlanEstimator(models, cluster_of("16x8:a100-80g"), "slo"))
    assert time.process_time() - began < 60


# -- what can't be


def test_a_group_without_room_says_who_lacks_how_much() -> None:
    models = [ModelLoad(f"m{at}", "llama-30b", 1.0) for at in range(3)]
    it = estimator(models, "1x2:a100-80g")
    found = place(it, whole(models), (2,))
    assert isinstance(found, UnplacedMember)
    assert found.placed == 2
    assert found.missing_bytes / 2**30 == pytest.approx(54.7, abs=0.1)


@pytest.mark.parametrize(
    ("models", "cluster", "sentence"),
    [
        (["llama-9b"], "1x8", "model m0: model is 'llama-9b', must be llama-13b or"),
        (["llama-65b"], "4x2", "m0: llama-65b needs 4 GPUs of one node, a node has 2"),
        (["llama-30b"] * 3, "1x2", r"the models don't fit: .* are 54\.\d GiB more than"),
    ],
)
def test_what_cant_be_placed_is_said_in_one_sentence(
    models: list[str], cluster: str, sentence: str
) -> None:
    llms = [ModelLoad(f"m{at}", kind, 1.0) for at, kind in enumerate(models)]
    with pytest.raises(ConfigError, match=sentence):
        check(llms, cluster_of(f"{cluster}:a100-80g"))


def test_an_instance_that_no_node_holds_is_said_with_what_is_missing() -> None:
    huge = ModelLoad("m", "llama-7b", 1.0, prompt_tokens=1e6)
    with pytest.raises(ConfigError, match=r"model m: one instance .* is 433\.6 GiB larger"):
        check([huge], cluster_of("1x1:a100-80g"))


@pytest.mark.parametrize(
    "text",
    ["8:a100-80g", "4x8", "0x8:a100-80g", "4x0:a100-80g", "1x17:a100-80g", "999x16:a100-80g"],
)
def test_a_cluster_that_cant_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--cluster"):
        cluster_of(text)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("", "m.toml: models is empty"),
        ('[[models]]\nname = "a"\nmodel = "x"\nrate = 0', "rate"),
        ('[[models]]\nname = "a"\nmodel = "x"\nrate = nan', "rate"),
        ('[[models]]\nname = "a"\nmodel = "x"\nrate = inf', "rate"),
        ('[[models]]\nname = ""\nmodel = "x"\nrate = 1', "name"),
        ('[[models]]\nname = "a"\nrate = 1', "model"),
        ('[[models]]\nname = "a"\nmodel = 7\nrate = 1', "model"),
        ('[[models]]\nname = "a"\nmodel = "x"\nrate = 1\ngpus = 2', "gpus"),
        ('[[models]]\nname = "a"\nmodel = "x"\nrate = 1\nprompt_tokens = 0', "prompt_tokens"),
        ('[[models]]\nname = "a"\nmodel = "x"\nrate = 1\n' * 2, "name is 'a' twice"),
        ("models = 3", "models"),
        ("[[", "m.toml"),
    ],
)
def test_models_that_cant_be_are_refused_with_their_field(row: str, sentence: str) -> None:
    text = row or "models = []"
    with pytest.raises(ConfigError, match=sentence):
        models_of(text, "m.toml")
