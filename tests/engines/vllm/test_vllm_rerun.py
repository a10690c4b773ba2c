"""A request that was lost with its engine goes on elsewhere from the tokens that its client has."""

from __future__ import annotations

from typing import Any

import pytest

from kvmig.engines.vllm import runner
from kvmig.engines.vllm.offload import CacheOffload
from tests.support.vllm_pair import PROMPT, SAMPLING, SEEDED, Pair
from tests.support.vllm_side import Output

pytestmark = pytest.mark.engine

LONG = [40 + number * number % 90 for number in range(300)]


async def rest_of(pair: Pair, prompt: list[int], whole: Output, known: int, **params: Any) -> None:
    """Run the request again from `known` tokens: the rest is what came the first time."""
    pair.submit(pair.b, "again", prompt, again=whole.tokens[:known], **params)
    await pair.b.entered()
    rest = await pair.finish("again")

    assert whole.tokens[:known] + rest.tokens == whole.tokens
    assert rest.logprobs == [pytest.approx(one, abs=1e-4) for one in whole.logprobs[known:]]
    assert rest.finish_reason == whole.finish_reason


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
async def test_the_rest_equals_that_of_an_undisturbed_run(
    pair: Pair, params: dict[str, Any]
) -> None:
    whole = await pair.unmoved(PROMPT, **params)
    await rest_of(pair, PROMPT, whole, 40, **params)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(params, id=name, marks=() if name == "penalties" else pytest.mark.long)
        for name, params in SAMPLING.items()
    ],
)
async def test_the_rest_after_the_first_token_does(pair: Pair, params: dict[str, Any]) -> None:
    whole = await pair.unmoved(PROMPT, **params)
    await rest_of(pair, PROMPT, whole, 1, **params)


async def test_a_grammar_goes_on_where_it_was(pair: Pair) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    def params() -> dict[str, Any]:
        guided = StructuredOutputsParams(regex="([0-9]{3}[a-f] ){30}")
        guided._backend = "xgrammar"
        return {**SEEDED, "structured_outputs": guided, "ignore_eos": False}

    whole = await pair.unmoved(PROMPT, **params())
    await rest_of(pair, PROMPT, whole, 33, **params())


async def test_prompt_log_probabilities_are_not_sent_twice(pair: Pair) -> None:
    whole = await pair.unmoved(PROMPT, prompt_logprobs=1)
    assert whole.prompt_logprobs

    await rest_of(pair, PROMPT, whole, 20, prompt_logprobs=1)

    assert pair.outputs["again"].prompt_logprobs == []


async def test_it_runs_before_those_that_wait(pair: Pair) -> None:
    whole = await pair.unmoved(LONG)
    for number in range(4):
        await pair.run(pair.b, f"busy {number}", PROMPT, max_tokens=30, until=1)
    pair.submit(pair.b, "behind", PROMPT, max_tokens=1)

    pair.submit(pair.b, "again", LONG, again=whole.tokens[:40])
    await pair.b.entered()
    pair.b.take_calls()

    waiting = [request.request_id for request in pair.b.scheduler.waiting]
    assert waiting == ["again", "behind"]
    for name in ("again", "behind", *(f"busy {number}" for number in range(4))):
        await pair.finish(name)
    assert pair.outputs["again"].tokens == whole.tokens[40:]


async def test_it_can_be_moved_before_it_has_come_to_its_turn_and_after(pair: Pair) -> None:
    whole = await pair.unmoved(LONG, **SEEDED)
    pair.submit(pair.a, "again", LONG, again=whole.tokens[:20], **SEEDED)
    await pair.a.entered()
    await pair.settle()
    pair.a.take_calls()

    await pair.move(pair.a, pair.b, "again", steps=0)
    await pair.step(pair.b, until=("again", 10))
    await pair.move(pair.b, pair.a, "again")

    assert whole.tokens[:20] + (await pair.finish("again")).tokens == whole.tokens


async def test_one_that_is_aborted_before_its_turn_leaves_nothing(pair: Pair) -> None:
    whole = await pair.unmoved(PROMPT)
    pair.submit(pair.a, "again", PROMPT, again=whole.tokens[:20])
    pair.a.engine.abort(["again"])
    await pair.a.entered()


async def test_what_its_tokens_do_not_determine_is_refused(pair: Pair) -> None:
    pair.submit(pair.a, "again", PROMPT, again=[50], resumable=True)
    await pair.a.entered()
    await pair.settle()

    assert str(pair.outputs["again"].finish_reason) == "error"
    assert str(pair.outputs["again"].stop_reason).endswith("go on with it: streaming input")
    assert pair.outputs["again"].tokens == []


@pytest.mark.parametrize("what", ["register", "entered"])
async def test_one_that_can_not_enter_ends_once_and_leaves_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Also in the workers that knew it already; it doesn't run on for nobody."""
    owner = runner if what == "register" else CacheOffload
    real = getattr(owner, what)

    def fail(*arguments: Any) -> None:
        real(*arguments)
        raise RuntimeError(f"{what} fails")

    monkeypatch.setattr(owner, what, fail)
    whole = await pair.unmoved(PROMPT)
    pair.submit(pair.a, "again", PROMPT, again=whole.tokens[:20])
    await pair.a.entered()
    ended = await pair.finish("again")
    monkeypatch.undo()
    await pair.unmoved(PROMPT)  # workers forget with the next step

    assert (str(ended.finish_reason), ended.tokens) == ("error", [])
    core = pair.a.core
    assert "again" not in core.scheduler.requests
    if not runner.uses_v2(core):
        assert "again" not in core.model_executor.driver_worker.worker.model_runner.requests
