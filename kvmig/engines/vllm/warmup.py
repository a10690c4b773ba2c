"""Requests that run every sampling path once, so that no client waits for a first time."""

from __future__ import annotations

import time

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest

_KINDS = (
    SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, top_k=5, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.7, repetition_penalty=1.1, ignore_eos=True),
)


_TOKEN = 1
_DRAFTED = tuple(
    # One token again and again: whatever is looked up is found, and drafts are taken.
    SamplingParams(max_tokens=8, ignore_eos=True, allowed_token_ids=[_TOKEN], **kind)
    for kind in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.0, "logprobs": 1})
)
"""With speculative decoding. The first draft compiles the drafter's and the rejection sampler's
kernels, which takes seconds and holds the interpreter: the instance would seem to hang."""


def warm_up_requests(config: VllmConfig) -> list[EngineCoreRequest]:
    """One short request for each kind of sampling; none for a model that doesn't sample."""
    if config.model_config.runner_type == "pooling":
        return []
    prompt = [min(token, config.model_config.get_vocab_size() - 1) for token in range(1, 9)]
    requests = [_request(f"kvmig-warm-up-{n}", prompt, one) for n, one in enumerate(_KINDS)]
    if config.speculative_config is not None:
        requests += [
            _request(f"kvmig-warm-up-draft-{n}", [_TOKEN] * 16, one)
            for n, one in enumerate(_DRAFTED)
        ]
    return requests


def _request(request_id: str, prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params.clone(),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        # A salt of its own: these blocks must not serve as anybody's prefix.
        cache_salt="kvmig-warm-up",
        data_parallel_rank=None,
    )
