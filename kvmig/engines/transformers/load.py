"""What an engine holds, read between two steps."""

from __future__ import annotations

from kvmig.engines.base import EngineLoad, RequestState
from kvmig.engines.transformers.requests import Requests, all_tokens


def engine_load(requests: Requests) -> EngineLoad:
    """Blocks and counts. O(waiting and running requests)."""
    scheduler, blocks = requests.scheduler, requests.blocks
    running = [state for key, state in scheduler.active_requests.items() if key in requests]
    demands = [
        blocks.needed(len(scheduler.waiting_requests[request_id].initial_tokens))
        for request_id in scheduler.waiting_requests_order
    ]
    return EngineLoad(
        total_blocks=blocks.total,
        used_blocks=blocks.total - blocks.free_now(),
        running=len(running),
        waiting=len(demands),
        head_blocks=demands[0] if demands else 0,
        waiting_blocks=sum(demands),
        prefill_blocks=sum(blocks.needed(len(one.remaining_prefill_tokens)) for one in running),
    )


def request_states(requests: Requests, most_waiting: int | None = None) -> list[RequestState]:
    """Every request that runs here, then of the queue the first `most_waiting`, in its order."""
    scheduler, blocks = requests.scheduler, requests.blocks
    place = {request_id: at for at, request_id in enumerate(scheduler.waiting_requests_order)}
    states: list[RequestState] = []
    for request_id in requests:
        if most_waiting is not None and place.get(request_id, -1) >= most_waiting:
            continue
        held, state = requests.held(request_id), requests.state(request_id)
        if state is None:
            continue
        tokens, waits = len(all_tokens(state)), request_id in place
        states.append(
            RequestState(
                request_id=request_id,
                state="suspended" if held.suspended else "waiting" if waits else "running",
                tokens=tokens,
                output_tokens=tokens - held.num_prompt_tokens,
                blocks=len(blocks.of(request_id)),
                priority=0,
                wanted_blocks=blocks.needed(tokens) if waits else 0,
            )
        )
    states.sort(key=lambda one: place.get(one.request_id, -1))
    return states
