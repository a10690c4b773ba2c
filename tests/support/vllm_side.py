"""One real vLLM engine in this process, stepped by hand."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmig.core.config import UnitConfig
from kvmig.engines.base import EmittedTokens, Frame
from kvmig.engines.gate import StepGate
from kvmig.models import BUNDLED
from tests.support.environment import environment

if TYPE_CHECKING:
    from kvmig.engines.vllm.device_sharing import DeviceSharing
    from kvmig.engines.vllm.incoming import IncomingRequests
    from kvmig.engines.vllm.load import RequestHoldings
    from kvmig.engines.vllm.memory import SharedCache
    from kvmig.engines.vllm.migration import VllmDestination
    from kvmig.engines.vllm.own_requests import OwnRequests
    from kvmig.engines.vllm.serving import ServingVllm

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
AS_SERVED = "--dtype=auto"
"""The 16 bits of a checkpoint, for tests of what lies in a KV cache."""
FLAGS = (
    "--enforce-eager", "--block-size=32", "--max-model-len=1216", "--max-num-seqs=4",
    "--max-num-batched-tokens=128", "--num-gpu-blocks-override=40", "--dtype=float32",
)  # fmt: skip
"""In 32 bits: a CPU without bfloat16 takes nine times as long for a prompt in 16."""


@dataclass
class Output:
    """What a request gave so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: Any = None
    stop_reason: Any = None
    error: Any = None
    cached_tokens: int = 0
    """Tokens of its prompt that the prefix cache had, or a connector."""
    transfer: dict[str, Any] | None = None
    """What a connector says to whoever reads its blocks."""
    stats: Any = None
    """`RequestStateStats`, as vLLM's front end keeps them."""


def remembered(worker: Any) -> list[str]:
    """Requests that a worker knows; runs there."""
    runner = worker.model_runner
    if hasattr(runner, "req_states"):  # model runner V2
        return list(runner.req_states.req_id_to_index)
    return list(runner.requests)


@dataclass(frozen=True)
class Configuration:
    """What an engine is started with; flags: besides FLAGS."""

    async_scheduling: bool = False
    flags: tuple[str, ...] = ()
    unit_tokens: int = 0
    model: Path = BUNDLED
    apart: bool = False
    """Whether the one worker is a process of its own."""
    shared: bool = False
    """Whether its KV cache can shrink and grow."""
    shares: tuple[int, int] | None = None
    """Of the device, that its steps keep to."""


BY_PRIORITY = Configuration(
    async_scheduling=True,
    flags=(
        "--scheduling-policy=priority",
        "--no-enable-prefix-caching",
        '--reasoning-config={"reasoning_start_str": "<", "reasoning_end_str": ">"}',
    ),
)


def start(wanted: Configuration) -> ServingVllm:
    """An engine that nobody steps yet."""
    from kvmig.engines.vllm import flags

    flags.set_environment()  # vLLM reads it when it is imported
    from torch._C import set_num_threads
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    from kvmig.engines.vllm.config import engine_config
    from kvmig.engines.vllm.serving import ServingVllm

    # vLLM looks at a model's class in a process of its own, which takes seconds.
    registry._run_in_subprocess = lambda look: look()
    # As ENVIRONMENT says, whatever has been imported; vLLM takes torch.set_num_threads away.
    set_num_threads(1)
    config = engine_config(flags.parse([str(wanted.model), *FLAGS, *wanted.flags]))
    if wanted.apart:
        config.parallel_config.distributed_executor_backend = "mp"
    # vLLM's CPU platform turns it off; the machinery is the same as on a GPU.
    config.scheduler_config.async_scheduling = wanted.async_scheduling
    unit = UnitConfig(path="unit", shares=wanted.shares) if wanted.shared else None
    engine = ServingVllm(config, unit_tokens=wanted.unit_tokens, unit=unit)
    # Once a process is enough; a second time it trips over numba, which ngram drafts bring.
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    return engine


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Inside the block nobody collects garbage.

    vLLM does when an engine starts and when it ends, so that the next one finds a GPU's memory
    free: two seconds for each, in which all that was ever imported is walked five times.
    """
    collect, collects = gc.collect, gc.isenabled()
    gc.disable()
    vars(gc)["collect"] = lambda generation=2: 0
    try:
        yield
    finally:
        vars(gc)["collect"] = collect
        if collects:
            gc.enable()


class Side:
    """One engine, with what its clients got."""

    def __init__(self, wanted: Configuration) -> None:
        # Servers that other tests start must not inherit what an engine sets in here.
        with environment(ENVIRONMENT), warnings.catch_warnings(), collecting_nothing():
            warnings.simplefilter("ignore")
            self.engine = start(wanted)
        self.core = self.engine._core
        self.core.process_input_queue_block = False
        self.unmoved: dict[str, Output] = {}
        """What requests gave that were left alone here; see `Pair.unmoved`."""

    def listen(self, outputs: dict[str, Output]) -> None:
        from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats

        from kvmig.engines.vllm.front import decode_outputs

        def on_outputs(client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
            batch = decode_outputs(frames)
            for one in batch.outputs:
                output = outputs.setdefault(one.request_id, Output())
                first = output.stats is None
                output.stats = output.stats or RequestStateStats()
                IterationStats().update_from_output(
                    one, batch.timestamp, first, output.stats, LoRARequestStates(), None
                )
                output.tokens += one.new_token_ids
                if one.prefill_stats is not None:
                    output.cached_tokens = one.prefill_stats.num_cached_tokens
                if one.new_logprobs is not None:
                    output.logprobs += one.new_logprobs.logprobs.tolist()
                if one.new_prompt_logprobs_tensors is not None:
                    output.prompt_logprobs.append(one.new_prompt_logprobs_tensors)
                output.finish_reason = one.finish_reason
                output.stop_reason = one.stop_reason
                output.transfer = one.kv_transfer_params
                output.error = getattr(one, "error", None)  # from vLLM 0.33 on

        self.engine._loop = asyncio.get_running_loop()
        self.engine._on_outputs = on_outputs

    def wait_for_new(self) -> None:
        """Until new requests are where the next step finds them."""
        for entering in list(self.engine._incoming.entering.values()):
            if isinstance(entering, Future):
                entering.result(10)

    async def entered(self) -> None:
        """The same, also for requests that ran elsewhere."""
        async with asyncio.timeout(10):
            while self.engine._incoming.entering:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def built(self) -> None:
        """Until the thread that prepares new requests has nothing to do."""
        await asyncio.to_thread(self.engine._builder._new.submit(lambda: None).result, 10)

    def look_at_load(self) -> None:
        """Have the engine look at its load now, however recent its last look is."""
        self.engine._load_at = 0.0
        self.engine._between_steps()

    def look_at_adapters(self) -> None:
        """Have the engine look at the files of adapters before its next step."""
        self.core._adapters_at = 0.0

    def share(self, gate: StepGate) -> None:
        """Ask `gate` before each step from now on."""
        self.device.gate_steps(self.core, gate)

    def take_calls(self) -> None:
        """What the engine's thread does between two steps."""
        while not self.core.input_queue.empty():
            self.core._handle_client_request(*self.core.input_queue.get_nowait())

    def step(self) -> None:
        """Calls, then one step if there is work."""
        self.take_calls()
        if self.core.has_work():
            self.core._process_engine_step()

    @property
    def scheduler(self) -> Any:
        """vLLM's own."""
        return self.engine._scheduler

    @property
    def holdings(self) -> RequestHoldings:
        return self.engine._holdings

    @property
    def destination(self) -> VllmDestination:
        return self.engine._destination

    @property
    def incoming(self) -> IncomingRequests:
        return self.engine._incoming

    @property
    def own(self) -> OwnRequests:
        return self.engine._own

    @property
    def cache(self) -> SharedCache:
        """The KV cache in memory that others may map."""
        cache = self.engine._memory._cache
        assert cache is not None
        return cache

    @property
    def device(self) -> DeviceSharing:
        return self.engine._device

    @property
    def attention_tokens(self) -> int | None:
        """Tokens of its smallest block of attention; None: it has states alone."""
        tables = self.engine._source._tables._tables
        return min((one.block_tokens for one in tables if not one.state), default=None)

    @property
    def used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def close(self) -> None:
        self.engine._memory.close()
        self.engine._builder.close()
        self.engine._close_side_channel()
        with collecting_nothing():
            self.core.shutdown()
