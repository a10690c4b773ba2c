"""A GPU in virtual time, shared by real vLLM engines: a bench's, on any machine.

Real: vLLM's scheduler, its blocks and preemptions, the step gate before each step
(`kvmig.engines.vllm.phase`), and who decides (`kvmig.sharing.step_scheduler`).
Modelled: how long a step takes, by `kvmig.placement` for its parts, batch and tokens, and by what
runs beside it (`kvmig_tools.sim.unit.Crowd`); nothing is computed, and every token is the same.

All engines are in this process and step when their job begins; the clock then jumps from event to
event. So a run is the same on a busy machine as on an idle one, and sockets take no part.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.executor import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from kvmig.engines.gate import PARTS, ComputeShares, StepGrant, StepKind, StepRequest
from kvmig.engines.vllm import flags
from kvmig.engines.vllm.config import engine_config
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.migration import token_request
from kvmig.engines.vllm.phase import StepPhase
from kvmig.models import BUNDLED
from kvmig.placement.step_costs import DeviceCosts, StepCost
from kvmig.sharing.memory_quotas import PERIOD_S, RULES, MemoryUse
from kvmig.sharing.step_scheduler import StepScheduler
from kvmig_tools.sim.unit import MOST_SEQUENCES, PREFILL_TOKENS, SHARED, Crowd

BLOCK_TOKENS = 32
MOST_TOKENS = 4096
"""Of a request."""
TOKEN = 50
LOST_S = 1e-3
"""A step that could compute nothing takes so long."""


class Batch(NamedTuple):
    """What a step was given."""

    prompt_tokens: int = 0
    squares: float = 0.0
    """Sum over its prompts (chunks) of the squared length at the end less that at the begin."""
    decodes: int = 0
    context: int = 0
    """Tokens of those that decode."""


class IdleWorker(CPUWorker):
    """Computes nothing: says `TOKEN` for every request whose prompt is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batch = Batch()
        """Of the last step."""
        self._prompts: dict[str, int] = {}

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's, for requests of tokens alone."""
        if not scheduler_output.total_num_scheduled_tokens:
            self.batch = Batch()
            return EMPTY_MODEL_RUNNER_OUTPUT
        cached = scheduler_output.scheduled_cached_reqs
        known: dict[str, tuple[int, int]] = {}
        for one in scheduler_output.scheduled_new_reqs:
            self._prompts[one.req_id] = len(one.prompt_token_ids)
            known[one.req_id] = one.num_computed_tokens, 0
        rows = zip(cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        known |= dict(zip(cached.req_ids, rows, strict=True))
        sampled: list[list[int]] = []
        prompt_tokens, squares, decodes, context = 0, 0.0, 0, 0
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            computed, outputs = known[name]
            end = computed + tokens
            if tokens == 1 and computed:
                decodes, context = decodes + 1, context + end
            else:
                prompt_tokens, squares = prompt_tokens + tokens, squares + end**2 - computed**2
            sampled.append([TOKEN] if end >= self._prompts[name] + outputs else [])
        self.batch = Batch(prompt_tokens, squares, decodes, context)
        names = list(scheduler_output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
        )


def job_s(cost: StepCost, batch: Batch, share: float) -> float:
    """How long a step takes alone: own decodes ride along with prompts, on weights that are read
    anyway."""
    if not batch.prompt_tokens:
        return cost.decode_s(batch.decodes, batch.context, share)
    _, sequence, token = cost.decode_line(share)
    riding = sequence * batch.decodes + token * batch.context
    return cost.prefill_s(batch.prompt_tokens, batch.squares, share) + riding


@dataclass
class Told:
    """Of one request. Virtual seconds."""

    arrival: float
    first: float = math.nan
    finished: float = math.nan


class Pass:
    """A gate whose answer is there before it is asked: the clock stands still meanwhile."""

    def __init__(self) -> None:
        self.limit_s = self.waited_s = 0.0
        self.answers = 0
        self.alone = False
        self.on_answer: Callable[[], None] = lambda: None
        self.granted: StepGrant | None = None

    def request_step(self, want: StepRequest) -> None:
        """It was."""

    def answer(self) -> StepGrant | None:
        """What the unit has granted."""
        grant, self.granted = self.granted, None
        return grant

    def reuse_grant(self) -> StepGrant | None:
        """Each step is granted anew."""
        return None

    def finish_step(self) -> None:
        """The unit knows when the step ends."""

    def close(self) -> None:
        """Nothing is held."""


class VirtualEngine:
    """One real engine on the unit."""

    def __init__(self, name: str, model: str, device: DeviceCosts, gpus: int, arena: float) -> None:
        """model: whose costs it has. arena: bytes that it could have alone."""
        self.now = 0.0
        cost = device.models[model].cost_on(gpus)
        assert cost is not None, f"{model} has no costs on {gpus} GPUs"
        self.name, self.cost = name, cost
        self.weights = device.models[model].weight_bytes
        self.block_bytes = device.models[model].token_bytes * BLOCK_TOKENS
        self.token_bytes = device.models[model].token_bytes
        self.gate = Pass()
        self.told: dict[str, Told] = {}
        self.came: list[tuple[str, bool]] = []
        """What the last step gave: request, whether it has finished."""
        self.preempted = 0
        words = [
            str(BUNDLED), "--enforce-eager", f"--block-size={BLOCK_TOKENS}",
            f"--max-model-len={MOST_TOKENS}", f"--max-num-seqs={MOST_SEQUENCES}",
            f"--max-num-batched-tokens={PREFILL_TOKENS}", "--no-enable-prefix-caching",
            f"--num-gpu-blocks-override={int(arena / self.block_bytes)}",
            "--worker-cls=bench.virtual_gpu.IdleWorker",
        ]  # fmt: skip
        config = engine_config(flags.parse(words))
        self.core = StepCore(config, Executor.get_class(config), False, self._deliver)
        self.core.process_input_queue_block = False
        self.phase = self.core.phase = StepPhase(self.core, self.gate, clock=lambda: self.now)
        self._pool = self.core.scheduler.kv_cache_manager.block_pool
        self._taken: list[Any] = []
        preempt = self.core.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.preempted += 1
            preempt(*args, **kwargs)

        self.core.scheduler._preempt_request = counted

    @property
    def worker(self) -> IdleWorker:
        worker: IdleWorker = self.core.model_executor.driver_worker.worker
        return worker

    @property
    def held_bytes(self) -> int:
        """Of its requests."""
        blocks = self._pool.num_gpu_blocks - 1 - len(self._taken) - self._pool.get_num_free_blocks()
        return int(blocks * self.block_bytes)

    @property
    def open(self) -> int:
        """Requests that have come and aren't finished."""
        return sum(math.isnan(one.finished) for one in self.told.values())

    def may_take(self, free_bytes: float) -> None:
        """It has so much beside what it holds."""
        wanted = max(0, int(free_bytes / self.block_bytes))
        free = self._pool.get_num_free_blocks()
        if free > wanted:
            self._taken += self._pool.get_new_blocks(free - wanted)
        elif count := min(len(self._taken), wanted - free):
            back, self._taken = self._taken[-count:], self._taken[:-count]
            self._pool.free_blocks(back)

    def submit(self, name: str, now: float, prompt: int, output: int) -> None:
        """A request comes."""
        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        request = token_request(name, [40] * prompt, params)
        request.arrival_time = now
        self.told[name] = Told(now)
        self.core.add(request)
        self.core._handle_client_request(*self.core.input_queue.get_nowait())

    def step(self, grant: StepGrant) -> Batch:
        """One step of vLLM's, now; what it was given."""
        self.gate.granted, self.came = grant, []
        self.worker.batch = Batch()
        self.core._process_engine_step()
        return self.worker.batch

    def close(self) -> None:
        """End it."""
        self.core.shutdown()

    def _deliver(self, item: tuple[int, EngineCoreOutputs]) -> None:
        self.came += [(one.request_id, one.finished) for one in item[1].outputs]


@dataclass(frozen=True)
class Coming:
    """A request to come."""

    at: float
    engine: str
    prompt: int
    output: int


@dataclass
class Seen:
    """What came of a run."""

    told: Mapping[str, list[Told]]
    preempted: Mapping[str, int]
    held: Mapping[str, float]
    """Mean bytes that each engine's requests held while requests came."""
    job_seconds: Mapping[tuple[str, StepKind], float]
    steps: int
    shares: dict[str, float] = field(default_factory=dict)
    """Of `held`."""


class VirtualUnit:
    """Engines on one unit, from the first request to the last end."""

    def __init__(
        self,
        device: DeviceCosts,
        gpus: int,
        engines: Iterable[VirtualEngine],
        shares: Mapping[str, ComputeShares],
        quotas: Mapping[str, float],
        policy: str,
        rule: str,
    ) -> None:
        """quotas: bytes, at first; their sum is the arena. rule: of `kvmig.sharing.memory_quotas`,
        or `SHARED`: who comes first takes what is free."""
        self.engines = {one.name: one for one in engines}
        self.now = 0.0
        self._turns = StepScheduler(policy, math.inf)
        for name in self.engines:
            self._turns.join(name, shares[name])
        self._crowd = Crowd(device.bandwidth * gpus)
        self._quotas, self._rule = dict(quotas), rule
        self._arena = sum(quotas.values())
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._busy: set[str] = set()
        self._to_come = 0
        self._seen_at = 0.0
        self._held = dict.fromkeys(self.engines, 0.0)
        """Bytes x seconds while requests come."""
        self._period = dict.fromkeys(self.engines, 0.0)
        """The same since quotas were adapted."""
        self._steps = 0

    def run(self, coming: Iterable[Coming]) -> Seen:
        """All of them, to their ends."""
        for engine in self.engines.values():
            engine.told, engine.preempted = {}, 0
        arrivals = sorted(coming, key=lambda one: one.at)
        self._to_come = len(arrivals)
        for number, one in enumerate(arrivals):
            self._at(one.at, lambda one=one, number=number: self._arrive(one, number))  # type: ignore[misc]
        if self._rule not in (SHARED, "fixed"):
            self._at(PERIOD_S, self._adapt)
        last = arrivals[-1].at
        while self._events:
            at, _, happen = heapq.heappop(self._events)
            self._count(at)
            self.now = at
            for engine in self.engines.values():
                engine.now = at
            happen()
            self._stir()
        total = sum(self._held.values())
        return Seen(
            {name: list(one.told.values()) for name, one in self.engines.items()},
            {name: one.preempted for name, one in self.engines.items()},
            {name: held / last for name, held in self._held.items()},
            dict(self._turns.job_seconds),
            self._steps,
            {name: held / total for name, held in self._held.items()},
        )

    def _at(self, at: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), happen))

    def _count(self, until: float) -> None:
        for name, engine in self.engines.items():
            area = engine.held_bytes * (until - self._seen_at)
            self._held[name] += area if self._to_come else 0.0
            self._period[name] += area
        self._seen_at = until

    def _arrive(self, one: Coming, number: int) -> None:
        self._to_come -= 1
        self.engines[one.engine].submit(f"{one.engine}-{number}", self.now, one.prompt, one.output)

    def _stir(self) -> None:
        for name, engine in self.engines.items():
            if name not in self._busy:
                self._make_room(engine)
                request = replace(engine.phase.next_request(), number=next(self._numbers))
                self._turns.request_step(name, request)
        for name, grant in self._turns.grants(self.now).items():
            self._begin(self.engines[name], grant)

    def _make_room(self, engine: VirtualEngine) -> None:
        if self._rule == SHARED:
            free = self._arena - sum(one.held_bytes for one in self.engines.values())
        else:
            free = self._quotas[engine.name] - engine.held_bytes
        engine.may_take(free)

    def _begin(self, engine: VirtualEngine, grant: StepGrant) -> None:
        self._make_room(engine)  # others have begun meanwhile
        batch = engine.step(grant)
        self._steps += 1
        seconds = LOST_S
        if batch.prompt_tokens or batch.decodes:
            share = (grant.parts or PARTS) / PARTS
            cache = batch.context * engine.token_bytes
            reads = 0 if batch.prompt_tokens else engine.weights + cache
            alone = job_s(engine.cost, batch, share)
            seconds = self._crowd.begin(engine.name, alone, self._turns.booked, reads)
        self._busy.add(engine.name)
        came = engine.came
        self._at(self.now + seconds, lambda: self._end(engine, grant, came))

    def _end(self, engine: VirtualEngine, grant: StepGrant, came: list[tuple[str, bool]]) -> None:
        self._crowd.end(engine.name)
        for name, finished in came:
            told = engine.told[name]
            if math.isnan(told.first):
                told.first = self.now
            if finished:
                told.finished = self.now
        self._busy.discard(engine.name)
        self._turns.finish_step(engine.name, grant.number, self.now)

    def _adapt(self) -> None:
        """Quotas by the live rule, as long as anything is here."""
        uses: list[MemoryUse] = []
        for name, engine in self.engines.items():
            running = len(engine.core.scheduler.running)
            held = engine.held_bytes
            mean = held / running if running else 0.0
            uses.append(
                MemoryUse(
                    model=name,
                    quota=int(self._quotas[name]),
                    floor=MOST_TOKENS * engine.token_bytes,
                    held=held,
                    mean=self._period[name] / PERIOD_S,
                    wanted=engine.open * mean,
                )
            )
            self._period[name] = 0.0
        self._quotas.update(RULES[self._rule](uses))
        if self._to_come or any(one.open for one in self.engines.values()):
            self._at(self.now + PERIOD_S, self._adapt)
