"""Where a seeded request's generator stands after so many tokens.

Model runner V1 draws from the request's generator once a sampled token, in a way that depends on
the platform's sampler. So that sampler draws once, to see how far that takes a generator; the
rest of the way is skipped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from kvmig.engines.vllm import runner
from kvmig.engines.vllm.core import StepCore

_AT_ONCE = 1 << 20
"""Numbers that are skipped by one call."""


def generator_after(core: StepCore, params: SamplingParams | None, tokens: int) -> bytes | None:
    """State of the generator of a request that has sampled `tokens` tokens.

    None where nothing is drawn from it: greedy, unseeded, or on model runner V2, whose
    seeds are stateless. Milliseconds where vLLM's sampler takes one number a token from a CPU's
    generator (its default), 3 ns a number where it takes two for each entry of the vocabulary;
    on a GPU the same however many tokens.
    """
    if runner.uses_v2(core) or params is None or params.sampling_type != SamplingType.RANDOM_SEED:
        return None
    config: VllmConfig = core.vllm_config
    model = config.model_config
    device = torch.device(config.device_config.device_type)
    generator = torch.Generator(device=device)
    generator.manual_seed(params.seed)
    if tokens:
        sampler = TopKTopPSampler(model.logprobs_mode, model.use_fp64_gumbel)
        logits = torch.zeros(1, model.get_vocab_size(), device=device)
        draw_times(
            generator,
            lambda one: sampler.forward(logits, {0: one}, None, None),
            tokens,
            logits.numel(),
        )
    return bytes(generator.get_state().numpy().tobytes())


def draw_times(
    generator: torch.Generator,
    draw: Callable[[torch.Generator], object],
    times: int,
    entries: int,
) -> None:
    """Leave `generator` where `times` (1 or more) calls of `draw` would.

    draw: takes equally many numbers each time: one, or one or two for each of `entries`.
    """
    if generator.device.type != "cpu":
        began = generator.get_offset()
        draw(generator)
        a_draw = generator.get_offset() - began
        generator.set_offset(began + times * a_draw)
        return
    before = generator.clone_state()
    draw(generator)
    for numbers in (1, 2, entries, 2 * entries):
        if torch.equal(_skipped(before.clone_state(), numbers), generator.get_state()):
            _skipped(generator, numbers * (times - 1))
            return
    for _ in range(times - 1):
        draw(generator)


def _skipped(generator: torch.Generator, numbers: int) -> torch.Tensor:
    """The state of a CPU's generator (mt19937) once so many 32-bit numbers were drawn from it."""
    while numbers:
        some = min(numbers, _AT_ONCE)
        torch.empty(some, dtype=torch.uint8).random_(generator=generator)
        numbers -= some
    return generator.get_state()
