"""A request that ran on a lost engine runs again from the tokens that its client has.

For this engine it is a request that was preempted: its prompt and outputs are computed
again, and the next step samples what would have come next.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from kvmig.engines.vllm import runner
from kvmig.engines.vllm.lora import replaced_since


def not_again(request: EngineCoreRequest, config: VllmConfig) -> str:
    """Why the tokens alone don't say how the request goes on; empty when they do."""
    params = request.sampling_params
    if request.resumable:
        return "streaming input"
    if params is None:
        return ""  # pooling: one output, at the end
    if params.thinking_token_budget is not None:
        # vLLM counts along while the request is in the batch, and miscounts when it returns.
        return "thinking token budget"
    if replaced_since(request.lora_request, request.arrival_time):
        return "LoRA adapter that was replaced after the request had begun"
    if config.aux_output_config.enabled:
        return "routed experts, which are gathered until the end"
    if config.speculative_config is not None and params.sampling_type == SamplingType.RANDOM_SEED:
        return "seeded sampling with speculative decoding"  # draws depend on what was proposed
    return ""


def without_what_was_sent(request: EngineCoreRequest) -> None:
    """Don't compute again what clients got with the first token."""
    if request.sampling_params is not None:
        request.sampling_params.prompt_logprobs = None
        request.sampling_params.prompt_logprob_token_ids = None


def go_on(core: EngineCore, request: Request, generator: bytes | None) -> None:
    """Put the request, with its output tokens, where preempted ones wait.

    On the engine's thread between two steps. generator: its state, see `draws`.
    """
    scheduler, request_id = core.scheduler, request.request_id
    assert isinstance(scheduler, Scheduler)
    request.status = RequestStatus.PREEMPTED
    request.prefill_stats = None  # reported with the first token
    scheduler.requests[request_id] = request
    if not runner.uses_v2(core):
        try:
            runner.register(core, request, ([],), generator)
        except Exception:
            del scheduler.requests[request_id]
            raise
    scheduler.waiting.prepend_request(request)
