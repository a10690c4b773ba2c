"""What a deployment's instances become one after the other, while their streams move. Pure.

Another build of vLLM, or other flags, but only those that neither front ends nor the layout of the
KV cache depend on. A deployment that has one instance gets another one first; the autoscaler lets
that go again.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple, Protocol

ROLLING = frozenset(
    {
        "--max-num-seqs", "--max-num-batched-tokens", "--long-prefill-token-threshold",
        "--max-num-partial-prefills", "--max-long-partial-prefills", "--enable-chunked-prefill",
        "--no-enable-chunked-prefill", "--enable-prefix-caching", "--no-enable-prefix-caching",
    }
)  # fmt: skip
"""How an engine schedules: what it computes, and with how much memory, is as before."""

Group = tuple[str, tuple[str, ...]]
"""A flag's name, and all its words."""


def grouped(flags: Sequence[str]) -> list[Group]:
    """Group each flag with its values."""
    groups: list[Group] = []
    for word in flags:
        if word.startswith("--") or not groups:
            groups.append((word.partition("=")[0].replace("_", "-"), (word,)))
        else:
            name, words = groups[-1]
            groups[-1] = (name, (*words, word))
    return groups


def can_roll(old: Sequence[str], new: Sequence[str]) -> bool:
    """Whether instances with the old flags can get the new ones one after the other.

    What is given behind the old flags can change those, but not take one away.
    """
    before, after = grouped(old), grouped(new)
    kept = [one for one in before if one[0] not in ROLLING]
    given = {name for name, _ in after}
    gone = {name for name, _ in before if name in ROLLING} - given
    return kept == [one for one in after if one[0] not in ROLLING] and not gone


def behind(flags: Sequence[str]) -> str:
    """What instances get behind the flags that their deployment was started with."""
    words = [word for name, group in grouped(flags) if name in ROLLING for word in group]
    return shlex.join(words)


class RolledStart(NamedTuple):
    """The flags and the vLLM with which the instances of a deployment are to start."""

    flags: str = ""
    """Behind the flags that the deployment was started with."""
    vllm: str = ""
    """Folder of the build of vLLM; empty: the installed one."""

    def __str__(self) -> str:
        build = f" and vLLM in {self.vllm}" if self.vllm else ""
        return f"{self.flags or 'its first flags'}{build}"


class FlaggedInstance(Protocol):
    """What counts here of an instance, as the deployment reports it."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def flags(self) -> str: ...
    @property
    def vllm(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def blocks_used(self) -> int: ...


class RollStep(NamedTuple):
    """What the deployment is asked next."""

    instance: str
    """The instance that starts again; empty: one more is to start."""
    start: RolledStart
    deadline_s: float | None = None
    """Seconds for those of its requests that no other instance can have; None: no limit."""


def is_settled(one: FlaggedInstance) -> bool:
    """Whether it serves, and is not to start again or to end: then there would be a detail."""
    return one.state == "serving" and not one.detail


def next_roll(
    instances: Sequence[FlaggedInstance], start: RolledStart, deadline_s: float | None = None
) -> RollStep | None:
    """The step towards instances that are all started so; None: nothing is to be done now."""
    live = [one for one in instances if one.state != "failed"]
    old = [one for one in live if start_of_instance(one) != start]
    if not old or not all(map(is_settled, live)):
        return None
    if len(live) == 1:
        return RollStep("", start)
    return RollStep(min(old, key=lambda one: one.blocks_used).id, start, deadline_s)


def start_of_instance(one: FlaggedInstance) -> RolledStart:
    """Flags and vLLM of its last start. A placement may have given it other flags, too."""
    return RolledStart(behind(shlex.split(one.flags)), one.vllm)


def has_others(instances: Sequence[FlaggedInstance], start: RolledStart) -> bool:
    """Whether an instance was started otherwise. One that only starts again, or is drained, does
    not count: the number of instances is decided as ever."""
    return any(one.state != "failed" and start_of_instance(one) != start for one in instances)


def has_rolled(instances: Sequence[FlaggedInstance], start: RolledStart) -> bool:
    """Whether all instances serve, and were started so."""
    live = [one for one in instances if one.state != "failed"]
    return bool(live) and all(
        one.state == "serving" and start_of_instance(one) == start for one in live
    )


def why_failed(
    instances: Sequence[FlaggedInstance], start: RolledStart, tried: RollStep | None
) -> str:
    """Why instances can't be started so; empty: not known. tried: what was asked for last, which
    is over once all instances serve."""
    for one in instances:
        if one.state == "failed" and start_of_instance(one) == start:
            return f"instance {one.id}: {one.detail}"
    settled = all(one.state == "failed" or is_settled(one) for one in instances)
    if tried is None or tried.start != start or not settled:
        return ""
    if any(one.id == tried.instance and start_of_instance(one) != start for one in instances):
        return f"instance {tried.instance} did not start with {start}"
    return ""
