"""A front end's AsyncLLM, and what one request's output does to others."""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import torch
from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats

from kvmig.asgi.errors import InstanceLost
from kvmig.core.errors import NoInstance
from kvmig.engines.base import Frame
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.vllm import flags
from kvmig.engines.vllm.config import engine_config
from kvmig.engines.vllm.front import OutputQueue, RoutedLLM, cached_tokens, salt_request
from kvmig.engines.vllm.outputs import (
    CarefulOutputs,
    before_failure,
    check_failure,
    failure,
)
from kvmig.frontend.call_aborts import CallAborts
from kvmig.frontend.isolation import OwnEntries
from kvmig.frontend.openai.vllm.server import VllmServer
from kvmig.frontend.router import FrontendRouter
from kvmig.models import BUNDLED
from tests.engines.vllm.test_vllm_multimodal import with_image
from tests.support.environment import environment
from tests.support.vllm_pair import Pair
from tests.support.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine

EACH = RequestOutputKind.DELTA


def request(name: str, params: SamplingParams | PoolingParams) -> EngineCoreRequest:
    sampling = params if isinstance(params, SamplingParams) else None
    pooling = params if isinstance(params, PoolingParams) else None
    made = EngineCoreRequest(name, [1, 2], None, sampling, pooling, 0.0, None, None, None)
    made.external_req_id = name
    return made


class Streams:
    """A processor, and what its requests' clients would get."""

    def __init__(self) -> None:
        self.processor = CarefulOutputs(None, log_stats=False)
        self.queues: dict[str, RequestOutputCollector] = {}

    def begin(self, name: str, params: SamplingParams | PoolingParams) -> None:
        queue = self.queues[name] = RequestOutputCollector(EACH, name)
        self.processor.add_request(request(name, params), None, queue=queue)

    def tokens(self, name: str) -> list[int]:
        """That have come since the last look."""
        output: Any = self.queues[name].get_nowait()
        return [] if output is None else list(output.outputs[0].token_ids)


def generating() -> SamplingParams:
    return SamplingParams(max_tokens=9, output_kind=EACH, detokenize=False)


def token(name: str, value: int) -> EngineCoreOutput:
    return EngineCoreOutput(name, [value])


def test_an_output_that_can_not_be_used_ends_its_own_request_and_no_other() -> None:
    streams = Streams()
    for name in "abc":
        streams.begin(name, generating())
    broken = streams.processor.request_states["b"]
    broken.logprobs_processor = None
    streams.processor.process_outputs([token(name, 7) for name in "abc"])
    assert (streams.tokens("a"), streams.tokens("c")) == ([7], [7])
    with pytest.raises(AssertionError):
        streams.queues["b"].get_nowait()
    streams.processor.process_outputs([token("a", 8), token("c", 8)])
    assert (streams.tokens("a"), streams.tokens("c")) == ([8], [8])


def test_what_a_stop_string_ended_before_the_failure_is_still_ended_in_its_engine() -> None:
    streams = Streams()
    for name in "ab":
        streams.begin(name, generating())
    ended, broken = (streams.processor.request_states[name] for name in "ab")
    ended.detokenizer.update = lambda ids, stopped: "the end"
    broken.logprobs_processor = None
    processed = streams.processor.process_outputs([token("a", 7), token("b", 7)])
    assert processed.reqs_to_abort == ["a"]


@pytest.mark.parametrize("read", [True, False])
def test_tokens_that_nobody_has_read_come_before_the_failure(read: bool) -> None:
    streams = Streams()
    streams.begin("a", generating())
    streams.processor.process_outputs([token("a", 7)])
    if read:
        assert streams.tokens("a") == [7]
    said = failure("the API key's quota is used up", "quota")
    failed = EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, stop_reason=said)
    streams.processor.process_outputs([failed])

    output: Any = streams.queues["a"].get_nowait()
    before = before_failure(output)

    assert (before is None) is read
    if before is not None:
        assert (list(before.outputs[0].token_ids), before.outputs[0].finish_reason) == ([7], None)
    with pytest.raises(GenerationError, match="quota is used up") as raised:
        check_failure(output)
    assert raised.value.status_code == 429


@pytest.mark.parametrize(
    ("said", "message", "retryable"),
    [
        ("retry: no instance", "no instance", True),
        ("final: it crashed two", "it crashed two", False),
        (None, "Internal server error", False),
    ],
)
def test_a_pooling_request_that_fails_says_why(
    said: str | None, message: str, retryable: bool
) -> None:
    streams = Streams()
    streams.begin("a", PoolingParams(task="embed"))
    streams.begin("b", PoolingParams(task="embed"))
    failed = EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, stop_reason=said)
    vector = EngineCoreOutput(
        "b", [], pooling_output=torch.ones(2), finish_reason=FinishReason.STOP
    )
    streams.processor.process_outputs([failed, vector])
    output = streams.queues["a"].get_nowait()
    assert isinstance(output, PoolingRequestOutput)
    assert output.finished
    assert output.error is not None
    assert (output.error.message, output.error.retryable) == (message, retryable)
    other = streams.queues["b"].get_nowait()
    assert isinstance(other, PoolingRequestOutput)
    assert other.outputs.data.tolist() == [1.0, 1.0]
    assert not streams.processor.has_unfinished_requests()


class Cluster:
    """In place of a router: no instance serves."""

    def __init__(self) -> None:
        self.aborts = CallAborts()

    async def submit(self, request: ClientRequest) -> object:
        raise NoInstance("no instance serves")

    def priority_of_call(self, asked: int) -> int:
        return asked

    def sequences_of_call(self) -> int:
        return 1

    def is_tenants_call(self) -> bool:
        return False

    async def abort(self, request_ids: Sequence[str], complete: bool) -> None:
        raise RuntimeError("a bug")

    async def call(self, method: str, payload: Sequence[Frame]) -> Mapping[str, Sequence[Frame]]:
        raise InstanceLost("no instance is connected")


@asynccontextmanager
async def front(cluster: Cluster, outlet: OutputQueue) -> AsyncIterator[RoutedLLM]:
    with environment(ENVIRONMENT):
        flags.set_environment()
        config = engine_config(flags.parse([str(BUNDLED), "--enforce-eager"]))
    llm = RoutedLLM(config, cluster, outlet, 1, ("generate",), log_stats=True, log_requests=False)
    try:
        yield llm
    finally:
        llm.shutdown()


async def test_a_request_that_no_instance_takes_leaves_nothing_behind() -> None:
    async with front(Cluster(), OutputQueue()) as llm:
        outputs = llm.generate({"prompt_token_ids": [1, 2]}, generating(), "r")
        with pytest.raises(GracefulHTTPError, match="no instance serves"):
            await anext(outputs)
        assert llm.get_num_unfinished_requests() == 0


async def test_a_request_is_of_its_calls_class_whatever_the_application_made_of_it() -> None:
    class Bound(Cluster):
        asked: ClientRequest | None = None

        def priority_of_call(self, asked: int) -> int:
            return 9

        def sequences_of_call(self) -> int:
            return 1

        async def submit(self, request: ClientRequest) -> object:
            self.asked = request
            raise NoInstance("no instance serves")

    cluster = Bound()
    async with front(cluster, OutputQueue()) as llm:
        outputs = llm.generate({"prompt_token_ids": [1, 2]}, generating(), "r", priority=-1)
        with pytest.raises(GracefulHTTPError):
            await anext(outputs)
    assert cluster.asked is not None
    assert cluster.asked.priority == 9


def test_the_answers_of_one_call_have_one_salt_and_one_name_for_each_image() -> None:
    whole = request("r", generating())
    whole.mm_features = with_image(1)["images"]
    first, last = copy.copy(whole), whole
    for one in (first, last):
        salt_request(one, "salt")
    assert first.cache_salt == last.cache_salt == "salt"
    names = [[one.identifier for one in answer.mm_features or ()] for answer in (first, last)]
    assert names == [["salt:image 1"]] * 2


async def test_a_front_end_comes_up_though_the_instance_that_it_heard_of_is_gone(
    pair: Pair,
) -> None:
    argv = [str(BUNDLED), "--enforce-eager"]
    with environment(ENVIRONMENT), socket.socket() as sock:
        server = VllmServer(argv, flags.parse(argv), sock, 2)
        await server.load()
    server.learn([pair.a.engine.describe()])

    app = await server.make_app(cast("FrontendRouter", Cluster()))

    assert "/v1/completions" in {getattr(route, "path", "") for route in app.routes}
    responses = app.state.openai_serving_responses
    for store in ("response_store", "msg_store", "event_store", "background_tasks"):
        assert isinstance(getattr(responses, store), OwnEntries)
    await server.stop(0.0)


async def test_an_error_in_what_hands_out_outputs_ends_no_stream() -> None:
    cluster, outlet = Cluster(), OutputQueue()
    async with front(cluster, outlet) as llm:
        queue = RequestOutputCollector(EACH, "r")
        params = SamplingParams(max_tokens=9, output_kind=EACH, stop=["the end"])
        llm.output_processor.add_request(request("r", params), None, queue=queue)

        def fail(**_: object) -> None:
            raise RuntimeError("a bug in a metric")

        assert llm.logger_manager is not None
        llm.logger_manager.record = fail
        for value in (65, 66):
            outlet.deliver(0, [token("r", value)], None)
            output: Any = await asyncio.wait_for(queue.get(), 10)
            assert list(output.outputs[0].token_ids) == [value]
        assert llm.is_running
        assert not llm.errored


async def test_between_two_of_many_batches_everybody_else_has_a_turn() -> None:
    outlet = OutputQueue()
    async with front(Cluster(), outlet):
        await asyncio.sleep(0)
        for _ in range(50):
            outlet.deliver(0, [token("unknown", 7)], None)
        turns = 0
        while not outlet.queue.empty():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 40


async def test_the_sources_of_kv_events_are_none_as_with_vllm() -> None:
    async with front(Cluster(), OutputQueue()) as llm:
        assert llm.get_kv_event_sources() == {}


def test_what_instances_of_other_machines_tell_is_on_the_front_ends_clock() -> None:
    now = [50.0]
    outlet = OutputQueue(clock=lambda: now[0])
    event = EngineCoreEvent(EngineCoreEventType.QUEUED, 999_998.0)
    first = EngineCoreOutput("r", [1], events=[event])
    outlet.deliver(0, [first], EngineCoreOutputs(timestamp=1_000_000.0))
    now[0] = 50.1
    outlet.deliver(1, [EngineCoreOutput("r", [2])], EngineCoreOutputs(timestamp=7.0))
    now[0] = 50.2
    outlet.deliver(1, [EngineCoreOutput("r", [3])], None)
    times = [outlet.queue.get_nowait().timestamp for _ in range(3)]
    assert times == pytest.approx([50.0, 50.1, 50.2])
    assert event.timestamp == pytest.approx(48.0)


def test_a_first_token_tells_what_the_prefix_cache_had_of_its_prompt() -> None:
    stats = PrefillStats()
    stats.set(50, 32, 0)
    begun = EngineCoreOutput("r", [1], prefill_stats=stats)
    outputs = EngineCoreOutputs(outputs=[begun, EngineCoreOutput("s", [2])])
    assert cached_tokens(outputs) == {"r": 32}
