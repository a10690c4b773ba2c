"""Units of several models in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.problem import GpuUnit, ModelLoad, PlacedInstance, cluster_of
from kvmig.placement.step_costs import DeviceCosts, load
from kvmig.sharing.policies import POLICIES
from kvmig_tools.sim.events import EventQueue
from kvmig_tools.sim.mux import Load, Outcome, poisson, share_gpt, simulate
from kvmig_tools.sim.request import SimRequest
from kvmig_tools.sim.unit import SimUnit, Tenant, parts

GIB = 2**30


@pytest.fixture(scope="module")
def device() -> DeviceCosts:
    return load("a100-80g")


def tenant(name: str, model: str = "llama-7b", quota: float = 20 * GIB) -> Tenant:
    return Tenant(name, model, 0.4, quota, 499.0)


def run(unit: SimUnit, events: EventQueue, *requests: tuple[str, SimRequest]) -> None:
    for name, request in requests:
        unit.submit(name, request)
    events.run()


def test_a_request_alone_takes_its_prompt_and_its_steps(device: DeviceCosts) -> None:
    events = EventQueue()
    one = Tenant("a", "llama-7b", 1.0, 20 * GIB, 499.0)
    request = SimRequest(0, 0.0, 100, 50)
    run(SimUnit(events, device, 1, [one]), events, ("a", request))
    cost = device.models["llama-7b"].tp["1"]
    prefill = cost.prefill_s(100, 100**2, 1.0)
    decode = sum(cost.decode_s(1, 100 + token, 1.0) for token in range(1, 50))
    assert request.first_token_at == pytest.approx(prefill)
    assert request.finished_at == pytest.approx(prefill + decode)


def test_a_single_token_ends_with_its_prompt(device: DeviceCosts) -> None:
    events = EventQueue()
    request = SimRequest(0, 0.0, 100, 1)
    run(SimUnit(events, device, 1, [tenant("a")]), events, ("a", request))
    assert request.finished_at == request.first_token_at > 0


def test_who_has_no_room_left_waits(device: DeviceCosts) -> None:
    events = EventQueue()
    unit = SimUnit(events, device, 1, [tenant("a", quota=499 * 524_288 * 2)])
    requests = [SimRequest(at, 0.0, 10, 20) for at in range(3)]
    run(unit, events, *[("a", one) for one in requests])
    ends = [one.finished_at for one in requests]
    assert ends[0] == ends[1]
    assert requests[2].first_token_at > ends[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_of_every_model_ends(device: DeviceCosts, policy: str) -> None:
    events = EventQueue()
    names = ("a", "b", "c")
    unit = SimUnit(events, device, 2, [tenant(name) for name in names], policy)
    requests = [(names[at % 3], SimRequest(at, 0.0, 50, 10 + at)) for at in range(60)]
    run(unit, events, *requests)
    assert all(one.finished_at > one.first_token_at > 0 for _, one in requests)
    assert all(one.outstanding == 0 for one in unit.tenants.values())


def test_models_beside_each_other_slow_each_other_down(device: DeviceCosts) -> None:
    ends = []
    for names in (("a",), ("a", "b", "c")):
        events = EventQueue()
        unit = SimUnit(events, device, 1, [tenant(name, quota=8 * GIB) for name in names])
        requests = [(name, SimRequest(0, 0.0, 50, 100)) for name in names]
        run(unit, events, *requests)
        ends.append(requests[0][1].finished_at)
    assert 1.2 * ends[0] < ends[1] < 3 * ends[0]


def test_quotas_go_to_the_model_with_the_backlog(device: DeviceCosts) -> None:
    events = EventQueue()
    size = 499 * 524_288
    unit = SimUnit(
        events, device, 1, [tenant("busy", quota=10 * size), tenant("idle", quota=60 * size)]
    )
    for at in range(400):
        unit.submit("busy", SimRequest(at, 0.0, 50, 300))
    events.run(until=60)
    assert unit.tenants["busy"].quota > 1.4 * 10 * size
    total = sum(one.quota for one in unit.tenants.values())
    assert total <= 70 * size


def test_a_model_without_costs_on_so_many_gpus_is_refused(device: DeviceCosts) -> None:
    with pytest.raises(ValueError, match="llama-65b has no costs on 1 GPUs"):
        SimUnit(EventQueue(), device, 1, [tenant("a", "llama-65b")])


def test_shares_become_parts() -> None:
    assert [parts(one) for one in (0.01, 0.3, 0.35, 0.9, 1.0)] == [1, 3, 4, 9, 10]


# -- placements under a load


def test_lengths_have_share_gpts_means() -> None:
    prompts, outputs = share_gpt(7, 20_000)
    assert np.mean(prompts) == pytest.approx(161, rel=0.03)
    assert np.mean(outputs) == pytest.approx(338, rel=0.03)
    assert max(np.add(prompts, outputs)) <= 2048
    assert np.std(outputs) / np.mean(outputs) == pytest.approx(
        ModelLoad("a", "b", 1).output_cv, abs=0.1
    )


def outcome(rate: float, instances: int, requests: int = 600) -> tuple[Outcome, PlanEstimator]:
    llm = ModelLoad("a", "llama-7b", rate)
    estimator = PlanEstimator([llm], cluster_of("1x8:a100-80g"))
    plan = tuple(GpuUnit(1, (PlacedInstance(0, rate / instances),)) for _ in range(instances))
    return simulate(estimator, plan, [poisson(llm, requests, 3)]), estimator


def test_what_comes_is_served_where_there_is_room() -> None:
    found, _ = outcome(3.0, 2)
    assert found.throughput[0] == pytest.approx(3.0, rel=0.2)
    assert found.in_time[8] == 1.0


def test_replicas_share_what_one_cant_carry() -> None:
    one, _ = outcome(20.0, 1)
    four, _ = outcome(20.0, 4)
    assert one.in_time[5] < 0.6 < four.in_time[5]
    assert four.requests_per_s > 1.5 * one.requests_per_s


def test_the_estimate_of_a_full_instance_is_near_the_simulation() -> None:
    found, estimator = outcome(50.0, 1, requests=3000)
    expected = estimator.unit(GpuUnit(1, (PlacedInstance(0, 50.0),)))
    assert expected is not None
    assert found.throughput[0] == pytest.approx(expected[0].throughput, rel=0.15)


def test_the_same_seed_gives_the_same_outcome() -> None:
    assert outcome(5.0, 2)[0] == outcome(5.0, 2)[0]


def test_the_axis_weights_throughputs_by_rates() -> None:
    found = Outcome((2.0, 1.0), {5: 1.0}, 2)
    assert found.axis([4.0, 2.0]) == (4 * 2 + 2 * 1) / 2
    assert found.requests_per_s == 3.0
    assert replace(found, throughput=(0.0, 0.0)).axis([4.0, 2.0]) == 0


def test_a_load_keeps_its_times_and_lengths() -> None:
    llm = ModelLoad("a", "llama-7b", 1.0)
    estimator = PlanEstimator([llm], cluster_of("1x1:a100-80g"))
    load = Load(llm, [1.0, 5.0], [10, 20], [1, 1])
    found = simulate(estimator, (GpuUnit(1, (PlacedInstance(0, 1.0),)),), [load])
    prefill = load_seconds(20)
    assert found.throughput[0] == pytest.approx(2 / (4 + prefill))


def load_seconds(tokens: int) -> float:
    return load("a100-80g").models["llama-7b"].tp["1"].prefill_s(tokens, tokens**2, 1.0)
