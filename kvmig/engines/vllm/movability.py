"""Which requests move: those whose whole state the adapter carries; the others stay, by name."""

from __future__ import annotations

from typing import NamedTuple

from vllm.config import KVTransferConfig, VllmConfig
from vllm.sampling_params import SamplingType
from vllm.v1.request import Request, RequestStatus

from kvmig.core.errors import MigrationRefused
from kvmig.engines.vllm.connectors import why_held

DRAFTERS = ("ngram", "draft_model", "eagle", "eagle3")
"""Speculative methods whose only state besides tokens and KV cache is the drafts of one step."""
_DRAFTERS = f"{', '.join(DRAFTERS[:-1])} or {DRAFTERS[-1]}"
_STATES = (
    RequestStatus.RUNNING,
    RequestStatus.WAITING,
    RequestStatus.PREEMPTED,
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
)


class UnmovableKinds(NamedTuple):
    """Why requests of a kind can't be moved from an engine; empty where they can."""

    media: str = ""
    """Why requests with images, videos or sound can't."""
    seeded: str = ""
    """Why requests that are sampled with a seed can't."""


NO_KINDS = UnmovableKinds()


def unmovable(
    request: Request,
    here: str,
    transfer: KVTransferConfig | None,
    kinds: UnmovableKinds = NO_KINDS,
) -> str:
    """Why the request can't be moved now, in a few words; empty when it can.

    here: why none of its engine's can, see `unmovable_engine`, which isn't to be asked each time:
    vLLM looks its answers up in the model's own files. kinds: nor is `unmovable_kinds`. transfer:
    the engine's KV connector.
    """
    return here or _kind(request, kinds) or why_held(request, transfer) or _moment(request)


def check_movable(request: Request, config: VllmConfig) -> None:
    """Raise MigrationRefused with the reason, if there is one."""
    here, kinds = unmovable_engine(config), unmovable_kinds(config)
    reason = unmovable(request, here, config.kv_transfer_config, kinds)
    if reason:
        raise MigrationRefused("unsupported", reason)


def _kind(request: Request, kinds: UnmovableKinds) -> str:
    params = request.sampling_params
    if params is None:
        return "pooling request"
    if request.resumable:
        return "streaming input"
    if request.prompt_embeds is not None:
        return "prompt embeddings"
    if params.thinking_token_budget is not None:
        # vLLM counts along while the request is in the batch, and miscounts when it returns.
        return "thinking token budget"
    if kinds.seeded and params.sampling_type == SamplingType.RANDOM_SEED:
        return kinds.seeded
    return kinds.media if request.mm_features else ""


def unmovable_engine(config: VllmConfig) -> str:
    """Why no request of such an engine moves: what its settings add to the state of each."""
    if config.model_config.runner_type == "pooling":
        return "pooling model"
    if config.model_config.is_diffusion:
        return "diffusion model"
    if config.cache_config.use_replayssm:
        return "ReplaySSM, which keeps tokens that its states lack"
    if config.aux_output_config.enabled:
        return "routed experts, which are gathered until the end"
    speculative = config.speculative_config
    if speculative is None:
        return ""
    if speculative.method not in DRAFTERS:
        return f"speculative decoding with {speculative.method}, which must be {_DRAFTERS}"
    if config.scheduler_config.async_scheduling:
        return "speculative decoding with asynchronous scheduling"  # drafts are on the device
    several = config.parallel_config.world_size > 1 and config.device_config.device_type != "cpu"
    if several and speculative.method != "ngram":
        return "drafts of several workers on GPUs, whose last writes are not known here"
    if config.observability_config.per_request_spec_decode_metrics != "none":
        return "speculative decoding with per-request metrics"
    return ""


def unmovable_kinds(config: VllmConfig) -> UnmovableKinds:
    """Which requests of such an engine have a state that stays in its model runner."""
    media, model = config.model_config.multimodal_config, config.model_config
    return UnmovableKinds(
        # With M-RoPE a token's position depends on which tokens of a video were left out before
        # it. The model runner knows once it has computed them, puts it right, and keeps it.
        media="media with video pruning, whose positions only the engine that computed them knows"
        if media is not None and media.video_pruning_rate and model.uses_mrope
        else "",
        # Runner V2 proposes on the device. Where a request comes to, its next step has no drafts:
        # what is drawn then depends on that.
        seeded="seeded sampling with drafts, which model runner V2 keeps on the device"
        if config.speculative_config is not None and config.use_v2_model_runner
        else "",
    )


def _moment(request: Request) -> str:
    if request.num_output_tokens == 0 and _scores_prompt(request):
        return "prompt log-probabilities still in prefill"
    if request.status not in _STATES:
        return f"request in state {request.status}"
    return ""


def _scores_prompt(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and (
        params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    )
