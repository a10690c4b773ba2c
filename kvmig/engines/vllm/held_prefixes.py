"""Notes which prompts' beginnings vLLM's prefix cache holds, as they come and go.

vLLM names its blocks by hashes of its own; what other instances' front ends can compute cheaply are
marks (`kvmig.core.prefix_marks`). Each change of the cache passes one of three methods of its block
pool, whether a request runs, comes from another instance, or makes way. What vLLM has offloaded to
the host counts as held, too: to load it takes much less than to compute it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_offload.base import (
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    make_offload_key,
)
from vllm.v1.request import Request

from kvmig.core.prefix_marks import MARK_TOKENS, MarkChain, MediaSpan
from kvmig.engines.held_marks import HeldMarks
from kvmig.engines.vllm.lora import given_name, media_name

MOST_KEYS = 1 << 16
"""Blocks whose marks are remembered in case that vLLM offloads them."""


def chain_of(request: Any, *, own: bool = False) -> MarkChain | None:
    """The marks of a request, as a front end or an engine has it; None: it has no tokens.

    request: vLLM's EngineCoreRequest or Request. own: it is an engine's, whose adapter and, with
    it, media have names of the engine's own: the marks are of those that front ends know.
    """
    if not request.prompt_token_ids or getattr(request, "prompt_embeds", None) is not None:
        return None
    lora, adapter, engines = request.lora_request, "", ""
    if lora is not None:
        adapter = given_name(lora) if own else lora.lora_name
        engines = media_name(lora, "") if own else ""
    spans = (
        MediaSpan(
            one.mm_position.offset,
            one.mm_position.offset + one.mm_position.length,
            one.identifier.removeprefix(engines),
        )
        for one in request.mm_features or ()
    )
    return MarkChain(request.cache_salt or "", adapter, tuple(spans))


def marks_of_prompt(request: Any) -> list[int]:
    """The marks of a new request's prompt, if a prefix cache is read for it. request: vLLM's
    EngineCoreRequest."""
    params = request.sampling_params or request.pooling_params
    if params is not None and params.skip_reading_prefix_cache:
        return []
    chain = chain_of(request)
    tokens = request.prompt_token_ids
    # The last token is always computed: its logits are wanted.
    return [] if chain is None else chain.extend(tokens, len(tokens) - 1)


def watch_prefixes(scheduler: Scheduler) -> HeldMarks | None:
    """The marks of what an engine holds, kept from now on; None: it shares no prefixes.

    Of an engine with several pools the blocks of full attention count: a hit takes all of them.
    """
    manager = scheduler.kv_cache_manager
    whole = (
        one for one in manager.coordinator.single_type_managers
        if isinstance(one, FullAttentionManager)
    )  # fmt: skip
    attention = next(whole, None)
    if attention is None or not manager.enable_caching:
        return None
    held, group = HeldMarks(), attention.kv_cache_group_id
    connector = scheduler.connector
    host = None
    if isinstance(connector, OffloadingConnector):
        offloading: OffloadingConnectorScheduler = connector.scheduler
        host = _HostWatch(offloading.manager, group, held)
    _PoolWatch(manager.block_pool, group, attention.block_size, held, host)
    return held


class _HostWatch:
    """Stands before the methods of what keeps account of offloaded blocks; on the engine's thread.

    Several blocks that are offloaded as one chunk have another key, and count for nothing.
    """

    def __init__(self, manager: OffloadingManager, group: int, held: HeldMarks) -> None:
        self._group = group
        self._held = held
        self._marks: OrderedDict[bytes, list[int]] = OrderedDict()
        """Marks of the blocks that were computed last, by their keys on the host."""
        self._prepare, self._complete = manager.prepare_store, manager.complete_store
        self._reset = manager.reset_cache
        manager.prepare_store = self._prepare_store
        manager.complete_store = self._complete_store
        manager.reset_cache = self._reset_cache

    def remember_mark(self, block: KVCacheBlock, mark: int) -> None:
        """The block holds the end of what the mark stands for."""
        if block.block_hash is None:
            return
        key = make_offload_key(get_block_hash(block.block_hash), self._group)
        marks = self._marks.setdefault(key, [])
        if mark not in marks:
            marks.append(mark)
        self._marks.move_to_end(key)
        if len(self._marks) > MOST_KEYS:
            self._marks.popitem(last=False)

    def _prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        prepared = self._prepare(keys, req_context)
        for key in () if prepared is None else prepared.evicted_keys:
            self._held.drop(key)
        return prepared

    def _complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._complete(keys, req_context, success)
        for key in keys if success else ():
            for mark in self._marks.get(key, ()):
                self._held.hold(key, mark)

    def _reset_cache(self) -> None:
        self._reset()
        self._held.clear_host()


class _PoolWatch:
    """Stands before a block pool's methods; on the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        group: int,
        block_tokens: int,
        held: HeldMarks,
        host: _HostWatch | None,
    ) -> None:
        self._group = group
        self._block_tokens = block_tokens
        self._held = held
        self._host = host
        self._chains: WeakKeyDictionary[Request, MarkChain] = WeakKeyDictionary()
        self._cache, self._remove = pool.cache_full_blocks, pool._remove_cached_block_hashes
        self._reset = pool.reset_prefix_cache
        pool.cache_full_blocks = self._cache_full_blocks
        pool._remove_cached_block_hashes = self._remove_hashes
        pool.reset_prefix_cache = self._reset_cache

    def _cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._cache(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id,
            *args, **kwargs,
        )  # fmt: skip
        if kv_cache_group_id != self._group or num_full_blocks * block_size < MARK_TOKENS:
            return
        chain = self._chains.get(request)
        if chain is None or chain.tokens > num_cached_blocks * block_size:  # it was preempted
            chain = chain_of(request, own=True)
            if chain is None:
                return
            self._chains[request] = chain
        first = chain.tokens
        end = min(num_full_blocks * block_size, request.num_tokens)
        for number, mark in enumerate(chain.extend(request.all_token_ids, end)):
            last_token = first + (number + 1) * MARK_TOKENS - 1
            block = blocks[last_token // block_size]
            if block.block_hash is not None:
                self._held.hold(block.block_id, mark)
                if self._host is not None:
                    self._host.remember_mark(block, mark)

    def _remove_hashes(self, block: KVCacheBlock) -> Any:
        self._held.drop(block.block_id)
        return self._remove(block)

    def _reset_cache(self) -> bool:
        done = self._reset()
        if done:
            self._held.clear()
        return done
