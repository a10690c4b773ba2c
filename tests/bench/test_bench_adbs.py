"""Real vLLM engines on a GPU in virtual time."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from kvmig.placement.step_costs import load
from tests.support.environment import environment
from tests.support.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine


def output(new: list[tuple[str, int]], cached: list[tuple[str, int, int]], **tokens: int) -> object:
    """A scheduler's output: new requests by prompt, others by computed and output tokens."""
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(tokens.values()),
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[1] * size, num_computed_tokens=0)
            for name, size in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[one[0] for one in cached],
            num_computed_tokens=[one[1] for one in cached],
            num_output_tokens=[one[2] for one in cached],
        ),
    )


def test_the_idle_worker_says_a_token_once_a_prompt_is_there_and_knows_what_a_step_was_given() -> (
    None
):
    from bench.virtual_gpu import TOKEN, Batch, IdleWorker

    worker = IdleWorker.__new__(IdleWorker)
    worker._prompts = {}
    said = worker.execute_model(output([("a", 100), ("b", 300)], [], a=100, b=150))
    assert said.sampled_token_ids == [[TOKEN], []]
    assert worker.batch == Batch(250, 100**2 + 150**2, 0, 0)
    said = worker.execute_model(output([], [("a", 100, 1), ("b", 150, 0)], a=1, b=150))
    assert said.sampled_token_ids == [[TOKEN], [TOKEN]]
    assert worker.batch == Batch(150, 300**2 - 150**2, 1, 101)


def test_a_step_takes_what_the_costs_say_and_decodes_ride_along_with_prompts() -> None:
    from bench.virtual_gpu import Batch, job_s

    cost = load("a100-80g").models["llama-7b"].tp["4"]
    decode = job_s(cost, Batch(decodes=10, context=3000), 0.4)
    assert decode == cost.decode_s(10, 3000, 0.4)
    prompts = job_s(cost, Batch(200, 200**2), 1.0)
    assert prompts == cost.prefill_s(200, 200**2, 1.0)
    both = job_s(cost, Batch(200, 200**2, 10, 3000), 1.0)
    assert prompts < both < prompts + cost.decode_s(10, 3000, 1.0)


@pytest.mark.long
def test_requests_of_two_engines_take_turns_and_all_end() -> None:
    from kvmig.engines.gate import ComputeShares
    from kvmig.engines.vllm import flags

    device = load("a100-80g")
    quotas = {"a": 8e9, "b": 8e9}
    with environment(ENVIRONMENT), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flags.set_environment()  # vLLM reads it when it is imported
        from bench.virtual_gpu import Coming, VirtualEngine, VirtualUnit

        engines = [VirtualEngine(name, "llama-7b", device, 4, 16e9) for name in quotas]
    shares = dict.fromkeys(quotas, ComputeShares(10, 4))
    unit = VirtualUnit(device, 4, engines, shares, quotas, "adbs", "kvmig")
    seen = unit.run([Coming(0.1 * at, "ab"[at % 2], 200, 50 + at) for at in range(40)])
    assert all(
        one.finished > one.first > one.arrival for told in seen.told.values() for one in told
    )
    assert set(seen.job_seconds) == {(n, k) for n in "ab" for k in ("prefill", "decode")}
    for engine in engines:
        engine.close()
