"""The model runner's part of a request: what vLLM's worker remembers beside the KV cache.

Runner V1 keeps output tokens and the seeded generator of each request; a request
that comes from elsewhere must be registered there. Runner V2 gets both with the
scheduler's output and seeds statelessly, so there is nothing to do.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState


def model_runner(core: EngineCore) -> Any:
    """The one worker's model runner (tensor-parallel size 1, executor in this process)."""
    return core.model_executor.driver_worker.worker.model_runner


def uses_v2(core: EngineCore) -> bool:
    """Whether vLLM runs model runner V2."""
    return bool(core.vllm_config.use_v2_model_runner)


def generator_state(core: EngineCore, request_id: str) -> bytes | None:
    """State of the request's seeded generator, None if it has none."""
    if uses_v2(core):
        return None
    state = model_runner(core).requests.get(request_id)
    if state is None or state.generator is None:
        return None
    return bytes(state.generator.get_state().numpy().tobytes())


def register(
    core: EngineCore, request: Request, block_ids: tuple[list[int], ...], generator: bytes | None
) -> None:
    """Make runner V1 know the request as if it had run here all along."""
    runner = model_runner(core)
    # Its row from an earlier stay here would be taken for the current one.
    if request.request_id in runner.input_batch.req_id_to_index:
        with torch.inference_mode():  # as in a step: some of its tensors were made in one
            runner.input_batch.remove_request(request.request_id)
    runner.requests[request.request_id] = CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        generator=_generator(runner.device, request, generator),
        block_ids=tuple(list(ids) for ids in block_ids),
        num_computed_tokens=request.num_computed_tokens,
        output_token_ids=list(request.output_token_ids),
        lora_request=request.lora_request,
    )


def keep_cpu_generators_from_chunks(core: EngineCore) -> None:
    """Let a seeded request's prompt be computed in chunks on a CPU.

    After a chunk vLLM throws the sampled token away and winds the generator back by its
    offset, which generators of a CPU don't have: the engine dies of it (0.32). Here such
    rows are sampled without their generator, so that there is nothing to wind back.
    """
    runner = None if uses_v2(core) else model_runner(core)
    if runner is None or runner.device.type != "cpu":
        return
    sample_tokens = runner.sample_tokens

    def sample(*args: Any, **options: Any) -> Any:
        batch = runner.input_batch
        thrown_away = numpy.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
        kept = {
            row: batch.generators.pop(row)
            for row in map(int, thrown_away)
            if row in batch.generators
        }
        try:
            return sample_tokens(*args, **options)
        finally:
            batch.generators.update(kept)

    runner.sample_tokens = sample


def _generator(
    device: torch.device, request: Request, state: bytes | None
) -> torch.Generator | None:
    params = request.sampling_params
    if params is None or params.seed is None:
        return None
    generator = torch.Generator(device=device)
    generator.manual_seed(params.seed)
    if state is not None:
        generator.set_state(torch.from_numpy(numpy.frombuffer(state, dtype=numpy.uint8).copy()))
    return generator
