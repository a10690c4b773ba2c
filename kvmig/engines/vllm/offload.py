"""vLLM's native offload (`--kv-offloading-size`) with requests that come and go by migration.

The connector learns of a request when the scheduler gets it, and of its blocks as steps hand them
out. A request that arrives with its KV passes both by, so `CacheOffload` informs it. And the
connector's copies to the host read blocks that are free already: nothing may arrive in these until
then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvmig.core.errors import MigrationRefused


class BeingOffloaded(MigrationRefused):
    """A free block is being copied to the host still, the request's own from an earlier stay or
    another: a step or two later it isn't."""

    def __init__(self) -> None:
        super().__init__("no_blocks", "a free block is being offloaded still")


class CacheOffload:
    """One engine's, on its thread; without an offload there is nothing to do."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Puts itself before the connector's view of each step."""
        self._scheduler = scheduler
        self._arrived: set[str] = set()
        """Requests whose blocks no step has shown to the connector yet."""
        connector = scheduler.connector
        if not isinstance(connector, OffloadingConnector):
            connector = None  # none, or one that keeps nothing of requests that arrive
        self._connector = connector
        if connector is not None:
            self._build_meta = connector.build_connector_meta
            connector.build_connector_meta = self._build

    def entered(self, request: Request) -> None:
        """A request is in the scheduler that didn't come by `Scheduler.add_request`."""
        if self._connector is not None:
            self._connector.on_new_request(request)
            if request.num_computed_tokens:
                self._arrived.add(request.request_id)

    def check_left(self, request_id: str) -> None:
        """Raise BeingOffloaded while copies go on under this id, for a request that left."""
        if self._connector is not None and request_id in self._offloading._req_status:
            raise BeingOffloaded

    def blocks_of(self, request: Request) -> set[int]:
        """The request's blocks; none without an offload, for none needs them."""
        if self._connector is None:
            return set()
        groups = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return {block_id for group in groups for block_id in group}

    def check_unread(self, block_ids: Iterable[int]) -> None:
        """Raise BeingOffloaded if one of these blocks, just allocated, is."""
        if self._connector is not None and not self._read().isdisjoint(block_ids):
            raise BeingOffloaded

    @property
    def _offloading(self) -> OffloadingConnectorScheduler:
        assert self._connector is not None
        return self._connector.scheduler

    def _read(self) -> set[int]:
        """Blocks whose copies are under way, or come with the next step."""
        offloading = self._offloading
        found: set[int] = set()
        for job in offloading._jobs.values():
            found.update(job.deferred_fence_block_ids or ())
            found.update(job.fenced_block_ids or ())
        for status in offloading._req_status.values():
            if status.req.is_finished():
                for group in status.group_states:
                    found.update(group.block_ids)
        return found

    def _build(self, output: SchedulerOutput) -> KVConnectorMetadata:
        """Show the connector all blocks of requests that have arrived since the last step."""
        arrived = self._arrived.intersection(output.num_scheduled_tokens)
        if arrived:
            self._arrived -= arrived
            blocks_of = self._scheduler.kv_cache_manager.get_block_ids
            cached = output.scheduled_cached_reqs
            whole = [
                blocks_of(request_id) if request_id in arrived else new
                for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True)
            ]
            resumed = cached.resumed_req_ids | arrived
            shown = replace(cached, new_block_ids=whole, resumed_req_ids=resumed)
            output = replace(output, scheduled_cached_reqs=shown)
        self._arrived.intersection_update(self._scheduler.requests)
        return self._build_meta(output)
