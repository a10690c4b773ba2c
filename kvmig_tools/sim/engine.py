"""A modelled engine: continuous batching over paged blocks, as vLLM schedules it.

Steps take what the cost model says. While nothing but decoding happens many steps are
one event, which ends early, at the end of a step, when something wants to happen there.
"""

from __future__ import annotations

from collections import deque

from kvmig_tools.sim.batch import DecodeBatch
from kvmig_tools.sim.cost import CostModel
from kvmig_tools.sim.events import Action, EventQueue, Timer
from kvmig_tools.sim.listener import Listener
from kvmig_tools.sim.prefix_cache import PrefixCache
from kvmig_tools.sim.prompt import Place, Prompt
from kvmig_tools.sim.queue import WaitingQueue
from kvmig_tools.sim.request import SimRequest
from kvmig_tools.sim.steps import Steps


class SimEngine:
    """One engine instance. Sizes in blocks."""

    def __init__(self, events: EventQueue, cost: CostModel, listener: Listener) -> None:
        self._events = events
        self.cost = cost
        self._listener = listener
        capacity = cost.capacity
        self.total = capacity.blocks
        self._block_tokens = capacity.block_tokens
        self._reserve = int(capacity.watermark * capacity.blocks)
        self.batch = DecodeBatch(capacity.block_tokens)
        self.prompts: list[Prompt] = []
        self.waiting = WaitingQueue(capacity.block_tokens)
        self.held: dict[int, int] = {}
        """Blocks by request: of those that are suspended, or on their way here."""
        self._suspended: set[int] = set()
        """Of `held`, those that ran here."""
        self.used = 0
        self._cache = PrefixCache(capacity.block_tokens) if capacity.prefix_cache else None
        self._steps: Steps | None = None
        self._timer: Timer | None = None
        self._calls: deque[Action] = deque()
        self.preemptions = 0
        self.busy_s = 0.0

    # -- what it holds

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self._block_tokens)

    @property
    def free(self) -> int:
        """Blocks that nobody holds, after those of the steps that are under way."""
        return self.total - self.used

    @property
    def running(self) -> int:
        """Requests that decode or whose prompts are computed."""
        return len(self.batch.requests) + len(self.prompts)

    @property
    def prefill_blocks(self) -> int:
        """What is still to be computed of prompts, as of the last step boundary."""
        return sum(self.blocks_for(one.tokens - one.computed) for one in self.prompts)

    @property
    def empty(self) -> bool:
        """Whether it holds nothing at all."""
        return not (self.running or self.waiting or self.held)

    def steps_ahead(self) -> int:
        """Steps of a leap that are done."""
        return self._steps.done_at(self._events.now) if self._steps is not None else 0

    def used_now(self) -> int:
        """Blocks in use, those of the step that runs included."""
        steps = self._steps
        if steps is None or steps.count == 1:
            return self.used
        begun = min(self.steps_ahead() + 1, steps.count)
        return self.used - self.batch.growth(steps.count) + self.batch.growth(begun)

    def boundary_before(self) -> float:
        """When the last step ended; now, if none runs."""
        steps = self._steps
        return self._events.now if steps is None else steps.end_of(self.steps_ahead())

    # -- what clients and llumlets ask for

    def submit(self, request: SimRequest) -> None:
        """Queue it: a new one, or one that has tokens but no cache. It fits by its size."""
        request.queued_at = self._events.now
        self.waiting.add(request)
        self._listener.changed()
        if self.waiting.head is request:
            self._stir()

    def lose_requests(self) -> list[SimRequest]:
        """Take out all that it runs or that wait here, without their cache; between two steps."""
        while self.running:
            self._preempt()
        lost = list(self.waiting)
        for request in lost:
            self.waiting.remove(request)
        return lost

    def at_boundary(self, call: Action) -> None:
        """Do it between two steps: now when idle, else when the running step ends."""
        self._calls.append(call)
        self._stir()

    def reserve(self, request: SimRequest, tokens: int) -> bool:
        """Take blocks for so many tokens and one spare, and a seat; between two steps."""
        blocks = self.blocks_for(tokens) + 1
        seats = self.running + len(self.held)
        if blocks > self.free or seats >= self.cost.capacity.max_sequences:
            return False
        self.held[request.index] = blocks
        self.used += blocks
        return True

    def hits(self, request: SimRequest, computed: int) -> int:
        """Blocks of one that is on its way here, with `computed` tokens' KV, that are here."""
        return self._cache.hits(request, computed) if self._cache is not None else 0

    def held_blocks(self, request: SimRequest) -> int:
        """Blocks of a new request's prompt that are here."""
        return self._cache.held_blocks(request) if self._cache is not None else 0

    @property
    def kept(self) -> PrefixCache | None:
        """What its free blocks still hold; None: it has no prefix cache."""
        return self._cache

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Tokens of all prompts that were begun, and those of them that were here; both without
        the prompts of requests that were preempted."""
        return (0, 0) if self._cache is None else (self._cache.asked_tokens, self._cache.hit_tokens)

    def grow(self, request: SimRequest, tokens: int) -> bool:
        """Hold at least so many tokens and one spare."""
        more = max(0, self.blocks_for(tokens) + 1 - self.held[request.index])
        if more > self.free:
            return False
        self.held[request.index] += more
        self.used += more
        return True

    def place_of(self, request: SimRequest) -> Place:
        """Where it stands; between two steps."""
        if request in self.batch:
            return Place(self.batch.tokens(request), self.batch.tokens(request) - 1, True)
        for prompt in self.prompts:
            if prompt.request is request:
                return Place(prompt.tokens, prompt.computed, False)
        return Place(request.tokens, 0, False)

    def suspend(self, request: SimRequest) -> Place:
        """Take it out of the batch or the queue; it keeps its blocks. Between two steps."""
        place = self.place_of(request)
        if place.decoding:
            blocks = self.batch.blocks(request)
            self.batch.remove(request)
        elif request in self.waiting:
            blocks = 0
            self.waiting.remove(request)
        else:
            (prompt,) = [one for one in self.prompts if one.request is request]
            blocks = prompt.blocks
            self.prompts.remove(prompt)
        self.held[request.index] = blocks
        if place.computed:
            self._suspended.add(request.index)
        self._room()
        return place

    def commit(self, request: SimRequest, place: Place) -> None:
        """Go on from `place` with a reserved request, or one that was suspended here."""
        held = self.held.pop(request.index)
        if request.index in self._suspended:
            self._suspended.remove(request.index)
        elif place.computed and self._cache is not None:
            self._cache.joined(request)
        if place.decoding:
            self.batch.add(request)
            self.used += self.batch.blocks(request) - held
        elif place.computed:
            prompt = Prompt(request, self.blocks_for(request.tokens))
            prompt.computed = place.computed
            self.prompts.append(prompt)
            self.used += prompt.blocks - held
        else:
            self.used -= held
            request.queued_at = self._events.now
            self.waiting.add(request)
        self._room()

    def release(self, request: SimRequest) -> None:
        """Free what is held for it. Unknown ones are ignored."""
        held = self.held.pop(request.index, 0)
        if request.index in self._suspended:
            self._suspended.remove(request.index)
            self._free(request, held)
        else:
            self.used -= held
        self._room()

    # -- steps

    def _stir(self) -> None:
        """Something changed: go on now when idle, else at the end of the running step."""
        steps = self._steps
        if steps is None:
            if self._timer is None:
                self._timer = self._events.at(self._events.now, self._boundary)
            return
        count = steps.count
        if steps.cut(self._events.now):
            self.used -= self.batch.growth(count) - self.batch.growth(steps.count)
            self._set_timer(steps.end)

    def _room(self) -> None:
        """Blocks or a seat became free, or the batch changed."""
        if self.waiting or self._steps is None:
            self._stir()

    def _set_timer(self, time: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._events.at(time, self._boundary)

    def _boundary(self) -> None:
        """Between two steps."""
        self._timer = None
        steps, self._steps = self._steps, None
        if steps is not None:
            self.busy_s += self._events.now - steps.begin
            self._step_done(steps)
        while self._calls:
            self._calls.popleft()()
        if self._timer is not None:  # a call stirred: we are about to look anyway
            self._timer.cancel()
            self._timer = None
        self._steps = self._plan()
        if self._cache is not None:
            self._cache.shrink(self.free)
        if self._steps is not None:
            self._set_timer(self._steps.end)
        self._listener.changed()

    def _step_done(self, steps: Steps) -> None:
        decoded = self.prompts and self.cost.capacity.prefill == "first"
        if self.batch.requests and not decoded:
            for request in self.batch.advance(steps.count):
                blocks = self.batch.blocks(request)
                self.batch.remove(request)
                self._free(request, blocks)
                self._finish(request)
        left: list[Prompt] = []
        for prompt in self.prompts:
            prompt.computed += prompt.step_tokens
            if prompt.computed < prompt.tokens:
                left.append(prompt)
            else:
                self._prompt_done(prompt)
        self.prompts = left

    def _prompt_done(self, prompt: Prompt) -> None:
        request, now = prompt.request, self._events.now
        if request.was_preempted:
            request.lost_s += now - request.preempted_at
            request.preempted_at = float("nan")
        request.generated += 1
        if request.generated == 1:
            request.first_token_at = now
            self._listener.first_token(request)
        if request.tokens >= request.final_tokens:
            self._free(request, prompt.blocks)
            self._finish(request)
        else:
            self.batch.add(request)

    def _free(self, request: SimRequest, blocks: int) -> None:
        """What it held is anybody's; what is in there stays until somebody takes it."""
        self.used -= blocks
        if self._cache is not None:
            self._cache.freed(request, blocks)

    def _finish(self, request: SimRequest) -> None:
        request.finished_at = self._events.now
        self._listener.finished(request)

    def _plan(self) -> Steps | None:
        """What to do next; blocks for it are taken."""
        if self.cost.capacity.prefill == "first":
            self._admit(self.cost.capacity.max_batch_tokens)
            if self.prompts:
                seconds = self.cost.prefill.base_ms / 1e3
                for prompt in self.prompts:
                    prompt.step_tokens = prompt.tokens - prompt.computed
                    seconds += self.cost.prompt_s(prompt.step_tokens, prompt.computed)
                return Steps(self._events.now, seconds)
            return self._decode()
        return self._mixed()

    def _decode(self) -> Steps | None:
        """As many steps as go without an end or a preemption."""
        batch = self.batch
        if not batch.requests:
            return None
        self._make_room()
        if not batch.requests:
            return None
        count = batch.steps_within(self.free, batch.steps_to_end())
        self.used += batch.growth(count)
        first = self.cost.decode_s(len(batch), batch.context)
        growth = self.cost.decode.per_context_token_ms * len(batch) / 1e3
        return Steps(self._events.now, first, growth, count)

    def _mixed(self) -> Steps | None:
        """Everybody decodes, and what is left of the step's tokens goes to prompts."""
        preempted = bool(self.batch.requests) and self._make_room()
        budget = self.cost.capacity.max_batch_tokens - len(self.batch)
        seconds = 0.0
        budget, seconds = self._chunk(self.prompts, budget)
        begun = len(self.prompts)
        if budget > 0 and not preempted:
            # The blocks of this very step are spoken for.
            growth = self.batch.growth(1)
            self.used += growth
            self._admit(budget)
            self.used -= growth
            _, more = self._chunk(self.prompts[begun:], budget)
            seconds += more
        if not self.prompts:
            return self._decode()
        if self.batch.requests:
            self.used += self.batch.growth(1)
            seconds += self.cost.decode_s(len(self.batch), self.batch.context)
        else:
            seconds += self.cost.prefill.base_ms / 1e3
        return Steps(self._events.now, seconds)

    def _chunk(self, prompts: list[Prompt], budget: int) -> tuple[int, float]:
        """Share `budget` tokens out in order: (what is left, seconds)."""
        seconds = 0.0
        for prompt in prompts:
            prompt.step_tokens = min(budget, prompt.tokens - prompt.computed)
            seconds += self.cost.prompt_s(prompt.step_tokens, prompt.computed)
            budget -= prompt.step_tokens
        return budget, seconds

    def _admit(self, budget: int) -> None:
        """Take requests from the queue, in order, until one doesn't fit."""
        whole = self.cost.capacity.prefill == "first"
        while self.waiting and budget > 0:
            request = self.waiting.head
            tokens = request.tokens
            blocks = self.blocks_for(tokens)
            running = self.running
            alone = running == 0 and not self.held
            if (
                (blocks > self.free - self._reserve and not (alone and blocks <= self.free))
                or running + len(self.held) >= self.cost.capacity.max_sequences
                or (whole and tokens > budget and self.prompts)
            ):
                return
            self.waiting.pop()
            prompt = Prompt(request, blocks)
            if self._cache is not None:
                prompt.computed = self._cache.start(request)
            budget -= tokens - prompt.computed
            self.used += blocks
            self.prompts.append(prompt)

    def _make_room(self) -> bool:
        """Preempt the last of the least priority until the next step fits; whether any was."""
        count = self.preemptions
        while self.batch.growth(1) > self.free:
            self._preempt()
        return self.preemptions > count

    def _preempt(self) -> None:
        candidates: list[SimRequest] = list(self.batch.requests.values())
        candidates += [prompt.request for prompt in self.prompts]
        victim = max(candidates, key=lambda one: one.rank)
        if victim in self.batch:
            blocks = self.batch.blocks(victim)
            self.batch.remove(victim)
        else:
            (prompt,) = [one for one in self.prompts if one.request is victim]
            self.prompts.remove(prompt)
            blocks = prompt.computed // self._block_tokens
            self.used -= prompt.blocks - blocks
        self._free(victim, blocks)
        self.preemptions += 1
        victim.preemptions += 1
        if not victim.was_preempted:
            victim.preempted_at = self._events.now
        victim.queued_at = self._events.now
        self.waiting.add(victim)
        self._listener.preempted(victim)
