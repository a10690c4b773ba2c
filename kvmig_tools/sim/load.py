"""What reports and victims' choice may know of a modelled engine. Nothing of what is to come."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvmig.engines.base import ClassLoad, EngineLoad, RequestState
from kvmig_tools.sim.request import SimRequest

if TYPE_CHECKING:
    from kvmig_tools.sim.engine import SimEngine


def engine_load(engine: SimEngine, queued_before: float, with_classes: bool) -> EngineLoad:
    """A report's content; of the queue only what came before a time."""
    waiting, blocks = engine.waiting.before(queued_before)
    return EngineLoad(
        total_blocks=engine.total,
        used_blocks=engine.used_now(),
        running=engine.running,
        waiting=waiting,
        head_blocks=engine.waiting.demand(engine.waiting.head) if waiting else 0,
        waiting_blocks=blocks,
        classes=_classes(engine) if with_classes else (),
        preempted_waiting=engine.waiting.preempted,
        prefill_blocks=engine.prefill_blocks,
    )


def _classes(engine: SimEngine) -> tuple[ClassLoad, ...]:
    """One a priority, first to run first."""
    ahead = engine.steps_ahead()
    running: Counter[int] = Counter()
    used: Counter[int] = Counter()
    for request in engine.batch.requests.values():
        running[request.priority] += 1
        used[request.priority] += engine.batch.blocks(request, ahead)
    for prompt in engine.prompts:
        running[prompt.request.priority] += 1
        used[prompt.request.priority] += prompt.blocks
    waiting = Counter(request.priority for request in engine.waiting)
    return tuple(
        ClassLoad(priority, running[priority], waiting[priority], used[priority])
        for priority in sorted(running.keys() | waiting.keys())
    )


def request_states(engine: SimEngine) -> list[RequestState]:
    """Every request that runs or waits there."""
    ahead, batch = engine.steps_ahead(), engine.batch
    states = []
    for one in batch.requests.values():
        tokens = batch.tokens(one, ahead)
        output, blocks = tokens - one.input_tokens, batch.blocks(one, ahead)
        states.append(
            RequestState(
                one.request_id,
                "running",
                tokens,
                output,
                blocks,
                one.priority,
                arrived_s=one.arrival,
            )
        )
    states += [_undecoded(one.request, "running", one.blocks, 0) for one in engine.prompts]
    states += [_undecoded(one, "waiting", 0, engine.waiting.demand(one)) for one in engine.waiting]
    return states


def _undecoded(one: SimRequest, state: str, blocks: int, wanted: int) -> RequestState:
    return RequestState(
        one.request_id,
        state,
        one.tokens,
        one.generated,
        blocks,
        one.priority,
        wanted_blocks=wanted,
        arrived_s=one.arrival,
    )
