"""A real vLLM engine whose steps are on streams of its shares, on a GPU of the tests' own: prompts
under the one share, decodes alone under the other, and every token as without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvmig.core.config import UnitConfig
from kvmig.engines.gate import StepGrant
from kvmig.engines.vllm import device_sharing, share_streams
from kvmig.engines.vllm.share_streams import NO_SMS
from kvmig.kernels.driver import CudaDriver
from tests.engines.vllm.test_vllm_gate import Scripted
from tests.support import fake_gpu
from tests.support.fake_gpu import FakeGpu
from tests.support.vllm_pair import LONG, PROMPT, Engines, Pair, assert_same
from tests.support.vllm_side import Configuration, Side

pytestmark = pytest.mark.engine

SMS = 40
SHARES = (8, 4)
UNIT = UnitConfig(path="unit", shares=SHARES)
PROMPTS = StepGrant(prompts=True, decodes=True, parts=SHARES[0])
DECODES = StepGrant(prompts=False, decodes=True, parts=SHARES[1])
TAKEN = {"prompts": 32, "decodes": 16, "all": SMS}


class Stream:
    """As torch's, of a stream of the driver's."""

    def __init__(self, gpu: CudaDriver, handle: int) -> None:
        self._gpu, self.cuda_stream = gpu, handle

    def wait_stream(self, other: Stream) -> None:
        event = self._gpu.new_event()
        self._gpu.record(event, other.cuda_stream)
        self._gpu.wait(self.cuda_stream, event)
        self._gpu.destroy_event(event)


class Torch:
    """What `share_streams` asks of torch.cuda."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.own = gpu, Stream(gpu, gpu.new_stream())
        self.now = self.own
        self.cuda = self

    def ExternalStream(self, handle: int) -> Stream:  # noqa: N802
        return Stream(self.gpu, handle)

    def current_stream(self) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


@pytest.fixture(scope="module")
def on_gpu(engines: Engines) -> Iterator[tuple[Side, Torch]]:
    """An engine with shares; at its end all SMs are given back (`fake_gpu.installed`)."""
    engines.close()  # the first that ends takes vLLM's process groups along
    with ExitStack() as held:
        patch = held.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("KVMIG_FAKE_SMS", str(SMS))
        patch.setenv("KVMIG_FAKE_MPS", "1")
        held.enter_context(fake_gpu.installed())
        torch = Torch(FakeGpu())
        held.callback(torch.gpu.destroy_stream, torch.own.cuda_stream)
        patch.setattr(share_streams, "torch", torch)
        with pytest.MonkeyPatch.context() as start:
            start.setattr(device_sharing, "streams_for", as_on_a_gpu)
            side = Side(Configuration(shared=True, shares=SHARES))
        yield side, torch
        side.close()
        side.device.close_streams()


def as_on_a_gpu(config: Any, unit: UnitConfig | None) -> Any:
    told = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        compilation_config=config.compilation_config,
    )
    return share_streams.streams_for(told, unit)


@pytest.fixture
async def pair(on_gpu: tuple[Side, Torch]) -> AsyncIterator[Pair]:
    side, _ = on_gpu
    pair = Pair(side, side)
    pair.begin()
    sharing = side.engine.sharing
    assert not isinstance(sharing, str)
    assert sharing.unlimited == ""
    task = asyncio.ensure_future(sharing.resize(1 << 30, 1 << 30, 60.0))
    while not task.done():
        side.take_calls()
        await asyncio.sleep(0)
    yield pair
    await pair.idle()
    side.core.phase = None


@contextmanager
def steps_noted(side: Side, torch: Torch) -> Iterator[list[tuple[bool, int]]]:
    """Of each step that computes: whether there were prompts, and the SMs that its work got."""
    noted: list[tuple[bool, int]] = []
    executor = side.core.model_executor
    execute = executor.execute_model

    def execute_model(scheduled: Any, *more: Any, **named: Any) -> Any:
        if scheduled.total_num_scheduled_tokens:
            most = max(scheduled.num_scheduled_tokens.values())
            stream = torch.now.cuda_stream
            torch.gpu.queue(stream, lambda: noted.append((most > 1, len(torch.gpu.sms(stream)))))
        return execute(scheduled, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "execute_model", execute_model)
        yield noted
        torch.gpu.settle()


async def test_prompts_are_computed_under_the_one_share_and_decodes_under_the_other(
    pair: Pair, on_gpu: tuple[Side, Torch]
) -> None:
    side, torch = on_gpu
    unmoved = await pair.unmoved(LONG, max_tokens=16)
    gate = Scripted(*[PROMPTS] * 5, *[DECODES] * 10)
    side.share(gate)
    with steps_noted(side, torch) as noted:
        pair.submit(side, "one", LONG, max_tokens=16)
        for _ in range(15):
            side.step()
        await pair.settle()
        assert torch.now is torch.own
        gate.alone = True
        assert_same(await pair.finish("one"), unmoved)
    assert noted[:5] == [(True, TAKEN["prompts"])] * 5
    assert noted[5:15] == [(False, TAKEN["decodes"])] * 10
    assert noted[15:] == [(False, TAKEN["all"])] * 5, "alone, it takes all"


async def test_a_step_that_fails_leaves_the_engine_on_its_own_stream(
    pair: Pair, on_gpu: tuple[Side, Torch], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, torch = on_gpu

    def fails() -> bool:
        assert torch.now is not torch.own
        raise RuntimeError("out of luck")

    gate = Scripted(PROMPTS)
    side.share(gate)
    pair.submit(side, "one", PROMPT, max_tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(side.core, "step_once", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            side.step()
    assert torch.now is torch.own
    assert gate.ended == 1
    gate.alone = True
    await pair.finish("one")


def test_graphs_are_captured_for_decodes_alone_and_on_their_stream(
    on_gpu: tuple[Side, Torch],
) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.distributed import parallel_state

    side, torch = on_gpu
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    )
    streams = side.device.streams
    assert not isinstance(streams, str)
    with streams.capturing(config):
        captured_on: Any = parallel_state.GraphCaptureContext(Any)
    assert len(torch.gpu.sms(captured_on.stream.cuda_stream)) == TAKEN["decodes"]
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY


def test_an_engine_that_does_not_start_gives_its_sms_back(on_gpu: tuple[Side, Torch]) -> None:
    before = fake_gpu.held()

    def start() -> None:
        compilation = SimpleNamespace(cudagraph_mode=None)
        with as_on_a_gpu(SimpleNamespace(compilation_config=compilation), UNIT):
            assert fake_gpu.held()["greens"] == before["greens"] + 2
            raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        start()
    assert fake_gpu.held() == before


def test_an_engine_on_a_cpu_says_that_it_has_no_sms(on_gpu: tuple[Side, Torch]) -> None:
    config: Any = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    with share_streams.streams_for(config, UNIT) as told:
        assert told == NO_SMS
