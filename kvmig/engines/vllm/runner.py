"""The model runner's part of a request: what vLLM's workers remember besides the KV cache.

Runner V1 keeps output tokens and the seeded generator of each request; a request
that comes from elsewhere must be registered there, with every worker. Runner V2 seeds
statelessly, and takes such a request as its scheduler's output would bring it.

All of this is called on the engine's thread; workers do it between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from kvmig.engines.vllm import worker
from kvmig.engines.vllm.bad_words import write_once
from kvmig.engines.vllm.lora import check_loads
from kvmig.engines.vllm.prompt_logprobs import compute_in_parts

WORKER_TIMEOUT_S = 60.0
"""Time after which a worker that doesn't answer is lost, and the engine with it."""


def uses_v2(core: EngineCore) -> bool:
    """Whether vLLM runs model runner V2."""
    return bool(core.vllm_config.use_v2_model_runner)


def generator_state(core: EngineCore, request_id: str) -> bytes | None:
    """State of the request's seeded generator, None if it has none."""
    params = core.scheduler.requests[request_id].sampling_params
    if uses_v2(core) or params is None or params.seed is None:
        return None
    state: bytes | None = _in_workers(core, worker.generator_state, request_id)[0]
    return state


def register(
    core: EngineCore, request: Request, block_ids: tuple[list[int], ...], generator: bytes | None
) -> None:
    """Make the model runners know the request as if it had run here all along.

    Otherwise it would have to come to them through the queue of those that wait: behind a long
    prefill, which takes the whole token budget of each step.
    """
    if uses_v2(core):
        arrived = NewRequestData.from_request(
            request,
            block_ids,
            list(request.all_token_ids),
            core.vllm_config.model_config.uses_mrope,
        )
        _in_workers(core, worker.register_v2, arrived)
        return
    state = CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        generator=None,
        block_ids=tuple(list(ids) for ids in block_ids),
        num_computed_tokens=request.num_computed_tokens,
        output_token_ids=list(request.output_token_ids),
        lora_request=request.lora_request,
    )
    _in_workers(core, worker.register, state, generator)


def prepare_workers(core: EngineCore) -> None:
    """Repair in the workers what moved, re-run and chunked requests would stumble over."""
    _in_workers(core, check_loads)
    if core.vllm_config.device_config.device_type == "cpu":
        _in_workers(core, worker.ask_for_tiles)
    if uses_v2(core):
        _in_workers(core, worker.take_with_steps)
    else:
        _in_workers(core, worker.keep_cpu_generators_from_chunks)
        _in_workers(core, compute_in_parts)
        _in_workers(core, write_once)
        if core.scheduler.kv_cache_config.has_mamba_layers:
            _in_workers(core, worker.forget_states_of_the_ended)
    if core.vllm_config.speculative_config is not None:
        _in_workers(core, worker.repair_drafts_on_a_cpu)


def _in_workers(core: EngineCore, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(worker, *args)` in every worker; what each returned."""
    results: list[Any] = core.model_executor.collective_rpc(
        function, timeout=WORKER_TIMEOUT_S, args=args
    )
    return results
