"""Makes transformers' manager of one model and its paged cache from a configuration."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.requests import RequestState as State
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from kvmig.core.errors import ConfigError, UnsupportedLayout
from kvmig.engines.transformers.cache import PooledCache
from kvmig.engines.transformers.config import EngineConfig
from kvmig.engines.transformers.pool import PoolShare, SharedPool
from kvmig.engines.transformers.sampling import LogprobRecorder, add_sampling

NAME = "kvmig"
"""The name of `MigratingScheduler` for `ContinuousBatchingConfig.scheduler_type`."""
_MAKING = threading.Lock()
"""Held while an engine is made: transformers' cache may be another class then."""


def make_manager(
    config: EngineConfig, pool: SharedPool | None = None
) -> tuple[Any, LogprobRecorder]:
    """The manager with its batch processor, and its log-probabilities; its loop is never started.

    pool: where its KV cache lies; None: in memory of its own. Raises ConfigError or
    UnsupportedLayout.
    """
    model_config = read_config(config)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("transformers engine: device is 'cuda', but torch sees no GPU")
    model = _model(config, model_config)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(
        generation,
        ContinuousBatchingConfig(
            page_size=config.block_tokens,
            num_blocks=config.num_blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_requests_per_batch=config.max_batch_requests,
            # Between two steps of the synchronous loop all that a request has is known.
            use_async_batching=False,
            use_cuda_graph=False,
            max_blocks_per_request=0,
            auto_switch_to_flash=False,
            scheduler_type=NAME,
            allow_block_sharing=config.share_prefixes,
            seed=0,
        ),
    )
    logprobs = add_sampling(manager.logit_processor)
    SCHEDULER_MAPPING[NAME] = MigratingScheduler
    with torch.no_grad(), _MAKING, _cache_in(pool, config):
        manager.batch_processor = manager._create_batch_processor()
    if config.device == "cuda":
        torch.cuda.synchronize()  # steps are queued on another stream than all this
    return manager, logprobs


def read_config(config: EngineConfig) -> Any:
    """The model's configuration. Raises ConfigError or UnsupportedLayout."""
    try:
        model_config = AutoConfig.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transformers engine: model is {config.model!r}, must be a checkpoint: {error}"
        ) from error
    refuse_windows(model_config.get_text_config())
    return model_config


@contextmanager
def _cache_in(pool: SharedPool | None, config: EngineConfig) -> Iterator[None]:
    """Caches that transformers makes are in `pool`."""
    if pool is None:
        yield
        return
    pooled = functools.partial(PooledCache, pool, config.num_blocks)
    with patch.object(continuous_api, "PagedAttentionCache", pooled):
        yield


def refuse_windows(model_config: Any) -> None:
    """Raises UnsupportedLayout unless all layers attend to all tokens."""
    try:
        kinds = sorted(group_layers_by_attn_type(model_config))
    except ValueError as error:
        raise UnsupportedLayout(f"{model_config.model_type}: {error}") from error
    if kinds != [FULL_ATTENTION]:
        raise UnsupportedLayout(
            f"{model_config.model_type} has layers with {' and '.join(kinds)};"
            f" kvmig moves {FULL_ATTENTION} only"
        )


def _model(config: EngineConfig, model_config: Any) -> Any:
    dtype = getattr(torch, config.dtype)
    if not config.random_weights:
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                config.model, dtype=dtype, attn_implementation="sdpa"
            )
        return model.to(config.device)
    with torch.random.fork_rng(), torch.device(config.device):
        torch.manual_seed(config.weights_seed)
        return AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation="sdpa"
        )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The bars of several engines would overwrite each other."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


class MigratingScheduler(FIFOScheduler):
    """transformers' own scheduler, which leaves alone requests with blocks outside of it: suspended
    and arriving ones."""

    elsewhere: Callable[[], int] = staticmethod(lambda: 0)
    """How many suspended and arriving ones are not among the active requests, but may be next."""

    @property
    def share(self) -> PoolShare | None:
        """The engine's share of a pool, where its KV cache is in one."""
        return self.cache.pool if isinstance(self.cache.pool, PoolShare) else None

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[Any, bool, int, int]:
        """The next step's requests; none if they have to wait for a migration's end, or for
        another engine's requests.

        The stock engine ends when its last request can't have the blocks that it needs: it takes
        for granted that no other engine has them.
        """
        batch = super().schedule_batch(token_budget, cache_budget)
        others = self.share is not None and any(one.live() for one in self.share.others)
        if batch[0] is None and (self.elsewhere() or others) and len(self.active_requests) <= 1:
            self.cache.evict_cached_blocks()
            batch = super().schedule_batch(token_budget, cache_budget)
            return ([], *batch[1:]) if batch[0] is None else batch
        return batch

    def _get_waiting_candidates(self) -> list[State]:
        """No more than can go on with those that are elsewhere, once they are back or here; none
        while another engine of the pool is short of what it is owed."""
        if self.share is not None and self.share.must_wait():
            return []
        seats = self.max_requests_per_batch - len(self.active_requests) - self.elsewhere()
        waiting: list[State] = super()._get_waiting_candidates()
        return waiting[: max(0, seats)]

    def is_short(self) -> bool:
        """Whether a request that runs, or the queue's head, has no room."""
        if any(state.request_id in self.active_requests for state, _ in self.starved_requests):
            return True
        seats = self.max_requests_per_batch - len(self.active_requests) - self.elsewhere()
        if not self.waiting_requests_order or seats <= 0:
            return False
        head = self.waiting_requests[self.waiting_requests_order[0]]
        wanted = len(head.remaining_prefill_tokens)
        fits = self.cache.can_store_request_tokens(head, wanted, dry_run=True)
        return not fits or self.cache.compute_free_capacity() < self.safety_margin
