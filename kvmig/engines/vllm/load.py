"""What an engine holds, read between two steps; blocks are those of `Units`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvmig.engines.base import ClassLoad, EngineLoad, RequestState
from kvmig.engines.vllm.follower import Follower
from kvmig.engines.vllm.movable import unmovable
from kvmig.engines.vllm.preemptions import Preemptions
from kvmig.engines.vllm.units import Units


def engine_load(scheduler: Scheduler, units: Units, preemptions: Preemptions) -> EngineLoad:
    """Blocks and counts. O(waiting and running requests)."""
    pool = scheduler.kv_cache_manager.block_pool
    total = pool.num_gpu_blocks - 1  # one is vLLM's null block
    waiting = _queue(scheduler)
    demands = [_demand(scheduler, request) * units.per_block for request in waiting]
    return EngineLoad(
        total_blocks=total * units.per_block,
        used_blocks=(total - pool.get_num_free_blocks()) * units.per_block,
        running=len(scheduler.running),
        waiting=len(demands),
        head_blocks=demands[0] if demands else 0,
        waiting_blocks=sum(demands),
        classes=_classes(scheduler, waiting, units),
        preempted=preemptions.counts(),
        seats=scheduler.max_num_running_reqs,
        preempted_waiting=sum(one.status is RequestStatus.PREEMPTED for one in waiting),
        prefill_blocks=sum(_left(request, units) for request in scheduler.running),
    )


def request_states(
    scheduler: Scheduler,
    units: Units,
    is_suspended: Callable[[str], bool],
    is_arriving: Callable[[str], bool],
) -> list[RequestState]:
    """Every request that the scheduler knows, but for those that run elsewhere still.

    The queue comes last, in its order.
    """
    running = {request.request_id for request in scheduler.running}
    place = {request.request_id: place for place, request in enumerate(_queue(scheduler))}
    states: list[RequestState] = []
    for request_id, request in scheduler.requests.items():
        if is_arriving(request_id):
            continue
        if is_suspended(request_id):
            state = "suspended"
        else:
            state = "running" if request_id in running else "waiting"
        (block_ids,) = scheduler.kv_cache_manager.get_block_ids(request_id)
        wanted = _demand(scheduler, request) if state == "waiting" else 0
        states.append(
            RequestState(
                request_id=request_id,
                state=state,
                tokens=request.num_tokens,
                output_tokens=request.num_output_tokens,
                blocks=len(block_ids) * units.per_block,
                priority=request.priority,
                unmovable=unmovable(request, scheduler.vllm_config),
                wanted_blocks=wanted * units.per_block,
                arrived_s=request.arrival_time,
            )
        )
    states.sort(key=lambda one: place.get(one.request_id, -1))
    return states


def _queue(scheduler: Scheduler) -> list[Request]:
    """Those that wait, first to be started first."""
    return [*scheduler.waiting, *scheduler.kv_holding_waiting]


def _demand(scheduler: Scheduler, request: Request) -> int:
    """The scheduler's blocks that admitting a waiting request takes."""
    return -(-request.num_tokens // scheduler.block_size)


def _left(request: Request, units: Units) -> int:
    """Units whose KV a running request lacks before it decodes; steps in flight count as done.

    One that decodes has its last token to compute, and no more; a follower decodes elsewhere.
    """
    tokens = request.num_tokens - request.num_computed_tokens
    return -(-tokens // units.tokens) if tokens > 1 and not isinstance(request, Follower) else 0


def _classes(scheduler: Scheduler, waiting: list[Request], units: Units) -> tuple[ClassLoad, ...]:
    """By priority; none while all are 0. A block that requests share counts for each."""
    running = scheduler.running
    if not any(request.priority for request in (*running, *waiting)):
        return ()
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    used: Counter[int] = Counter()
    for request in running:
        used[request.priority] += len(manager.req_to_blocks.get(request.request_id, ()))
    runs = Counter(request.priority for request in running)
    waits = Counter(request.priority for request in waiting)
    return tuple(
        ClassLoad(priority, runs[priority], waits[priority], used[priority] * units.per_block)
        for priority in sorted({*runs, *waits})
    )
