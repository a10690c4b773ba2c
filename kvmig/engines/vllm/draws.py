"""Where a seeded request's generator stands after so many tokens.

Model runner V1 draws from the request's generator once a sampled token, in a way that
depends on the platform's sampler; so the draws are made again by that sampler itself.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from kvmig.engines.vllm import runner
from kvmig.engines.vllm.core import StepCore


def generator_after(core: StepCore, params: SamplingParams | None, tokens: int) -> bytes | None:
    """State of the generator of a request that has sampled `tokens` tokens.

    None where nothing is drawn from it: greedy, unseeded, or on model runner V2, whose
    seeds are stateless. O(tokens), some tens of microseconds each: on no engine's thread.
    """
    if runner.uses_v2(core) or params is None or params.sampling_type != SamplingType.RANDOM_SEED:
        return None
    config: VllmConfig = core.vllm_config
    device = torch.device(config.device_config.device_type)
    generator = torch.Generator(device=device)
    generator.manual_seed(params.seed)
    model = config.model_config
    sampler = TopKTopPSampler(model.logprobs_mode, model.use_fp64_gumbel)
    logits = torch.zeros(1, model.get_vocab_size(), device=device)
    for _ in range(tokens):
        sampler.forward(logits, {0: generator}, None, None)
    return bytes(generator.get_state().numpy().tobytes())
