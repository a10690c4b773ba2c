"""The roll-out of a changed model: what the change needs, and the next step to it. Pure.

    -start-> new one starts -serves-> 10 % of new calls -hold_s-> 50 % -hold_s-> 100 %
                    |                        |                                     |
                    '------- it fails, or is worse: stopped, 0 % ---.     the old one's streams end
                                                                    '-> the old one has all again

A deployment of the new revision stands next to the old one. A call goes to one of them and ends
there: no stream changes its weights. What the old deployment must do, and where calls go, follows
from the roll-out and from what is seen; the roll-out itself is all that is stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvmig.core.errors import ConfigError
from kvmig.fleet.flag_rolls import RolledStart, behind, can_roll
from kvmig.fleet.spec import ModelSpec

RolloutState = Literal["running", "paused", "stopped"]
Need = Literal["nothing", "roll", "beside", "start"]
"""What a change takes: nothing; that instances start again one after the other; another deployment
next to the one that runs; or the next start, since there can't be two."""

HOLD_S = 60.0
MOST_STEPS = 20
MOST_S = 7 * 86400.0
CALLS = 20
"""Calls at each deployment from which on they are compared."""
MORE_CUT = 0.1
"""The most by which the share of cut calls may be larger at the new deployment."""
MOST_CUT = 0.5
"""The share of cut calls that is too large in any case."""
SLOWER = 1.5
"""Times the old deployment's median time to the first token that the new one's may be."""
SLOWER_MS = 100.0
"""Milliseconds by which it must be slower, too: below that it is noise."""


class RolloutTerms(Struct, frozen=True, kw_only=True):
    """How a roll-out goes, as an order says."""

    canary: tuple[int, ...] = ()
    """The calls of 100 that the new deployment gets, step by step; 100 comes last."""
    hold_s: float = HOLD_S
    """Seconds from one step to the next."""
    deadline_s: float | None = None
    """Seconds that the old deployment's streams get, once it gets no new ones; None: no limit."""
    over: Mapping[str, int] = {}
    """Targets of roll-outs that are done, by models' ids: their rows may still be stored."""


AT_ONCE = RolloutTerms()
"""The steps without a canary: all new calls go to the new deployment once it serves."""


class RolloutPlan(Struct, frozen=True, kw_only=True):
    """A roll-out that is under way. Times are Unix seconds."""

    base: int
    """The revision that it began from."""
    target: int
    canary: tuple[int, ...] = (100,)
    hold_s: float = HOLD_S
    deadline_s: float | None = None
    step: int = -1
    """Which of `canary`; -1: none yet."""
    since: float = 0.0
    """When the step, or the state, began."""
    state: RolloutState = "running"
    why: str = ""
    """Why it has stopped."""

    @property
    def share(self) -> int:
        """The calls of 100 that the new deployment is to get while it serves."""
        return 0 if self.step < 0 else self.canary[self.step]


class RolloutView(Struct, frozen=True):
    """What is seen of a roll-out now."""

    old_ended: bool = False
    """Whether no old deployment is there, and none is to start again."""
    new_ready: bool = False
    new_failed: str = ""
    """Why the new deployment can't start; empty: it can."""
    worse: str = ""
    """Why the new one is worse than the old one; empty: it isn't, or that isn't known yet."""


class CallFigures(Struct, frozen=True):
    """What became of a deployment's calls."""

    ended: int = 0
    cut: int = 0
    """The calls whose client got an error, or left."""
    ttft_ms: float | None = None
    """Median time to the first token."""
    timed: int = 0
    """Calls whose time to the first token is known."""


def start_of(spec: ModelSpec) -> tuple[object, ...]:
    """What decides how a deployment is started; all else of a specification takes effect at once.

    One that decides by freeness itself is started with its numbers.
    """
    counts = spec.instances
    itself = counts.target_kind == "freeness"
    numbers = (spec.least, counts.max, counts.target) if itself else None
    return (
        spec.engine, spec.source, spec.flags, spec.load, tuple(sorted(spec.adapters.items())),
        spec.share_prefixes, spec.gpus, spec.tensor_parallel or spec.workers,
        spec.gpu_memory, spec.unit, spec.vllm,
        spec.command, spec.health, spec.served, spec.parallel, spec.stream_usage,
        spec.hang_timeout_s, tuple(sorted(spec.pass_environment)), numbers,
    )  # fmt: skip


def need_of(old: ModelSpec, new: ModelSpec) -> Need:
    """What it takes to make a deployment of the old specification one of the new one."""
    if start_of(old) == start_of(new):
        return "nothing"
    if old.unit or new.unit or old.served != new.served:  # calls are named before they go to one
        return "start"
    alike = start_of(replace(old, flags=(), vllm=new.vllm)) == start_of(replace(new, flags=()))
    return "roll" if alike and can_roll(old.flags, new.flags) else "beside"


def instance_start(started: ModelSpec, wanted: ModelSpec) -> RolledStart | None:
    """The start that turns the instances of a deployment, which was started as the one, into what
    the other wants; None: they can't become that."""
    need = need_of(started, wanted)
    if need not in ("nothing", "roll"):
        return None
    flags = behind(wanted.flags) if started.flags != wanted.flags else ""
    return RolledStart(flags, wanted.vllm)


def with_live_fields(old: ModelSpec, new: ModelSpec) -> ModelSpec:
    """The old specification with all of the new one that takes effect at once."""
    if new.instances.target_kind == "freeness" or old.instances.target_kind == "freeness":
        new = replace(new, instances=old.instances)
    return replace(
        new,
        engine=old.engine,
        source=old.source,
        flags=old.flags,
        vllm=old.vllm,
        load=old.load,
        command=old.command,
        health=old.health,
        served=old.served,
        parallel=old.parallel,
        stream_usage=old.stream_usage,
        hang_timeout_s=old.hang_timeout_s,
        pass_environment=old.pass_environment,
        adapters=old.adapters,
        share_prefixes=old.share_prefixes,
        gpus=old.gpus,
        gpus_per_instance=old.gpus_per_instance,
        tensor_parallel=old.tensor_parallel,
        gpu_memory=old.gpu_memory,
        unit=old.unit,
        unit_memory=old.unit_memory,
    )


def checked_terms(
    canary: Sequence[int], hold_s: float = HOLD_S, deadline_s: float | None = None
) -> RolloutTerms:
    """Raises ConfigError."""
    steps = tuple(canary)
    rises = all(low < high for low, high in itertools.pairwise(steps))
    if not rises or not all(1 <= one <= 100 for one in steps) or len(steps) > MOST_STEPS:
        raise ConfigError(
            f"canary is {','.join(map(str, steps))[:100]}, must be at most {MOST_STEPS} rising"
            " percentages from 1 to 100, such as 10,50,100"
        )
    for field, value in (("hold_s", hold_s), ("deadline_s", deadline_s)):
        if value is not None and not 0 <= value <= MOST_S:
            raise ConfigError(f"{field} is {value:g}, must be 0 to {MOST_S:g}")
    return RolloutTerms(canary=steps, hold_s=hold_s, deadline_s=deadline_s)


def begun(terms: RolloutTerms, base: int, target: int, now: float) -> RolloutPlan:
    """A roll-out by these terms, before its first step."""
    steps = terms.canary if terms.canary[-1:] == (100,) else (*terms.canary, 100)
    return RolloutPlan(
        base=base,
        target=target,
        canary=steps,
        hold_s=terms.hold_s,
        deadline_s=terms.deadline_s,
        since=now,
    )


def advance(plan: RolloutPlan, seen: RolloutView, now: float) -> RolloutPlan | None:
    """The roll-out a moment later; None: it is done, and the new deployment is the model's."""
    if plan.state == "stopped":
        return plan
    if seen.new_failed:
        return stopped(plan, seen.new_failed, now)
    if plan.state == "running" and seen.old_ended:
        return None
    if plan.step >= 0 and seen.worse:
        return stopped(plan, seen.worse, now)
    if plan.state == "paused":
        return plan
    due = seen.new_ready if plan.step < 0 else now - plan.since >= plan.hold_s
    return _next_step(plan, now) if due and seen.new_ready else plan


def _next_step(plan: RolloutPlan, now: float) -> RolloutPlan:
    if plan.step + 1 >= len(plan.canary):
        return plan
    return replace(plan, step=plan.step + 1, since=now)


def stopped(plan: RolloutPlan, why: str, now: float) -> RolloutPlan:
    """The same with all new calls at the old deployment, until an order comes."""
    return replace(plan, state="stopped", step=-1, since=now, why=why)


def paused(plan: RolloutPlan, now: float) -> RolloutPlan:
    """The same with each call going where calls go now. Raises ConfigError."""
    if plan.state != "running":
        raise ConfigError(f"the roll-out is {plan.state}, must be running")
    return replace(plan, state="paused", since=now)


def resumed(plan: RolloutPlan, now: float) -> RolloutPlan:
    """The same, on its way again; one that has stopped begins from its first step.

    Raises ConfigError.
    """
    if plan.state == "running":
        raise ConfigError("the roll-out is running, must be paused or stopped")
    return replace(plan, state="running", since=now, why="")


def promoted(plan: RolloutPlan, now: float) -> RolloutPlan:
    """The same with the next step at once, at any time. Raises ConfigError."""
    if plan.state == "stopped":
        raise ConfigError("the roll-out is stopped, must be running or paused (resume it)")
    if plan.share == 100:
        raise ConfigError("the roll-out has all new calls at the new deployment already")
    return _next_step(plan, now)


def takes_all(plan: RolloutPlan, *, new_ready: bool) -> bool:
    """Whether the old deployment gets no new calls any more. A new one that doesn't serve for a
    moment gives them back, as long as the old one is there."""
    return plan.share == 100 and new_ready


def gives_way(plan: RolloutPlan, *, no_room: bool, running: int, now: float) -> bool:
    """Whether the old deployment ends so that the new one has room, which there isn't for both.

    That is once nothing runs on it, or at the deadline; new calls wait meanwhile.
    """
    if plan.state != "running" or plan.step >= 0 or not no_room:
        return False
    return not running or _is_late(plan, now)


def is_overdue(plan: RolloutPlan, now: float) -> bool:
    """Whether the streams of an old deployment that gets no new ones have had their time."""
    return plan.share in (0, 100) and _is_late(plan, now)


def _is_late(plan: RolloutPlan, now: float) -> bool:
    return plan.deadline_s is not None and now - plan.since >= plan.deadline_s


def worse(old: CallFigures, new: CallFigures) -> str:
    """Why the new deployment is worse than the old one; empty: it isn't, as far as is known."""
    if new.ended >= CALLS:
        share = new.cut / new.ended
        known = old.ended >= CALLS
        limit = min(MOST_CUT, old.cut / old.ended + MORE_CUT) if known else MOST_CUT
        if share > limit:
            before = f", of the old one's {old.cut} of {old.ended}" if known else ""
            return f"of {new.ended} calls at the new revision {new.cut} were cut{before}"
    if old.ttft_ms is None or new.ttft_ms is None or min(old.timed, new.timed) < CALLS:
        return ""
    if new.ttft_ms > max(SLOWER * old.ttft_ms, old.ttft_ms + SLOWER_MS):
        return (
            f"the new revision's median time to the first token is {new.ttft_ms:.0f} ms, the old"
            f" one's {old.ttft_ms:.0f} ms"
        )
    return ""
