"""What a worker's model runner V1 remembers of requests; runs in the workers.

Each function is sent to all workers by `collective_rpc` and gets vLLM's worker first. They
remember the same, since each of them samples.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState


def generator_state(worker: Any, request_id: str) -> bytes | None:
    """State of the request's seeded generator, None if it has none."""
    state = worker.model_runner.requests.get(request_id)
    if state is None or state.generator is None:
        return None
    return bytes(state.generator.get_state().numpy().tobytes())


def register(worker: Any, request: CachedRequestState, generator: bytes | None) -> None:
    """Know the request as if it had run here all along."""
    runner = worker.model_runner
    # Its row from an earlier stay here would be taken for the current one.
    if request.req_id in runner.input_batch.req_id_to_index:
        with torch.inference_mode():  # as in a step: some of its tensors were made in one
            runner.input_batch.remove_request(request.req_id)
    runner.mamba_state_idx.pop(request.req_id, None)  # the place of its state then
    if runner.uses_mrope:
        runner._init_mrope_positions(request)
    request.generator = _generator(runner.device, request, generator)
    runner.requests[request.req_id] = request


def keep_cpu_generators_from_chunks(worker: Any) -> None:
    """Let a seeded request's prompt be computed in chunks on a CPU.

    After a chunk vLLM throws the sampled token away and winds the generator back by its
    offset, which generators of a CPU don't have: the engine dies of it (0.32). Here such
    rows are sampled without their generator, so that there is nothing to wind back.
    """
    runner = worker.model_runner
    if runner.device.type != "cpu":
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


def forget_states_of_the_ended(worker: Any) -> None:
    """Let a request's id come again where its request ended, or left, before.

    vLLM (0.32) remembers in which block a request's state is until a later step computes
    something. If the same id comes before that, as of a request that is run again, it takes
    the first one's block for the new one's, and the engine dies of it.
    """
    runner = worker.model_runner
    on_removed = runner._on_request_state_removed

    def removed(request_id: str, state: CachedRequestState | None) -> None:
        on_removed(request_id, state)
        runner.mamba_state_idx.pop(request_id, None)

    runner._on_request_state_removed = removed


def _generator(
    device: torch.device, request: CachedRequestState, state: bytes | None
) -> torch.Generator | None:
    params = request.sampling_params
    if params is None or params.seed is None:
        return None
    generator = torch.Generator(device=device)
    generator.manual_seed(params.seed)
    if state is not None:
        generator.set_state(torch.from_numpy(numpy.frombuffer(state, dtype=numpy.uint8).copy()))
    return generator
