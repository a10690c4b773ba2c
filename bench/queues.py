"""What it costs a vLLM engine to say what waits in it, by the length of its queue.

vLLM's own scheduler, without an engine: nothing is loaded, nothing computes. A snapshot is what
the engine's thread takes after a step; a list is what it gives for the choice of requests to move.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmig.controlplane.mover import MOST_WAITING
from kvmig.models import BUNDLED

if TYPE_CHECKING:
    from kvmig.engines.vllm.load import RequestHoldings

POLICIES = ("fcfs", "priority")
WAITING = (10, 100, 1_000, 10_000)

FIGURES = np.random.default_rng(1).random(10_000)

BLOCK_TOKENS = 16
BLOCKS = 1000


def scheduler(policy: str) -> Any:
    """A vLLM `Scheduler` of the bundled model; policy: fcfs or priority."""
    from kvmig.engines.vllm import flags

    flags.set_environment()  # vLLM reads it when it is imported
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from kvmig.engines.vllm.config import engine_config

    config = engine_config(
        flags.parse([str(BUNDLED), f"--scheduling-policy={policy}", f"--block-size={BLOCK_TOKENS}"])
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    model = config.model_config
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, cache, StructuredOutputManager(config), BLOCK_TOKENS)


def request(name: str, tokens: int, priority: int = 0) -> Any:
    """A vLLM `Request` with a prompt of so many tokens, that arrives now."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request(
        name, [1] * tokens, SamplingParams(max_tokens=10), None, time.time(), priority=priority
    )


@dataclass(frozen=True)
class Look:
    """One look at a queue, at which requests of two priorities wait. Processor time."""

    queue: str
    waiting: int
    snapshot_us: float
    list_us: float
    sort_us: float


def measure(waiting: tuple[int, ...], repeats: int) -> list[Look]:
    """Lengths take turns; the first look at each is thrown away."""
    looks: list[Look] = []
    for policy in POLICIES:
        holdings = {count: _filled(policy, count) for count in waiting}
        for repeat in range(repeats + 1):
            for count, held in holdings.items():
                snapshot_us = _microseconds(held.load)
                list_us = _microseconds(partial(held.listing, MOST_WAITING, (), ()))
                if repeat:
                    looks.append(Look(policy, count, snapshot_us, list_us, sort_us()))
    return looks


def sort_us() -> float:
    """Processor time of NumPy's stable sort and sum of 10,000 figures: the yardstick."""
    return _microseconds(lambda: (np.sort(FIGURES, kind="stable"), FIGURES.sum()))


def _filled(policy: str, count: int) -> RequestHoldings:
    from kvmig.engines.vllm.load import RequestHoldings
    from kvmig.engines.vllm.subblocks import SubBlocks
    from kvmig.engines.vllm.tables import RequestTables

    filled = scheduler(policy)
    holdings = RequestHoldings(filled, RequestTables(filled, SubBlocks(BLOCK_TOKENS)), "")
    for number in range(count):
        filled.add_request(request(f"r{number}", 20 + number % 100, number % 2))
    return holdings


def _microseconds(work: Callable[[], object]) -> float:
    began = thread_time()
    work()
    return (thread_time() - began) * 1e6
