"""Which fault comes when: drawn from the seed before anything starts. Pure.

Cards are dealt from two decks, each shuffled anew when it is empty: whatever may happen at any
time, and every state of the handshake. So a run of some length has each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.machine import Table
from kvmig.kvtransfer.source_machine import SourceMachine

PROCESSES = ("instance", "scheduler", "front-end", "fork-server")
AGENT = "unit-agent"
DEEDS = ("kill", "stop", "squeeze")
"""SIGKILL, SIGSTOP for seconds, no more memory for seconds."""
PAUSES_S = (0.5, 2.0, 4.0, 12.0)
"""How long something lasts; the last is longer than a silent instance is waited for (10 s)."""
SURROUNDINGS = (
    ("sever", "transport"),
    ("cut", "transport"),
    ("slow", "transport"),
    ("corrupt", "transport"),
    ("fill", "shm"),
    ("fill", "log"),
    ("jump", "clock"),
)
PRIVATE = ("shm", "log")
"""Targets that need a mount namespace."""


@dataclass(frozen=True)
class Fault:
    """at_s: since the load began; seconds: how long it lasts; number: which of several."""

    at_s: float
    deed: str
    target: str
    seconds: float
    number: int

    @property
    def kind(self) -> str:
        """For reports; handshake states are put together."""
        return f"{self.deed} {self.target.split('.')[0]}"


def entered(table: Table) -> list[str]:
    """All states that some event leads to from another one, in their order."""
    after = {after for before, row in table.items() for after in row.values() if after != before}
    return [state for state in table if state in after]


HANDSHAKE = [
    f"{side}.{state}"
    for side, machine in (("source", SourceMachine), ("destination", DestinationMachine))
    for state in entered(machine.table)
]


def plan(
    seed: int, seconds: float, every_s: float, private: bool = True, units: bool = False
) -> list[Fault]:
    """The faults of a run of so many seconds. private: with those that need a namespace.
    units: with a unit's agent, which every third fault kills."""
    random = Random(f"faults {seed}")
    processes = (*PROCESSES, AGENT) if units else PROCESSES
    general = [(deed, target) for deed in DEEDS for target in processes]
    general += [card for card in SURROUNDINGS if private or card[1] not in PRIVATE]
    handshake = [(deed, state) for deed in DEEDS for state in HANDSHAKE]
    decks = [_dealt(general, random), _dealt(handshake, random)]
    if units:
        decks.append(_dealt([("kill", AGENT)], random))
    faults: list[Fault] = []
    at_s = every_s / 2
    while at_s < seconds - every_s:
        deed, target = next(decks[len(faults) % len(decks)])
        lasts = random.choice(PAUSES_S)
        faults.append(Fault(round(at_s, 2), deed, target, lasts, random.randrange(1000)))
        at_s += every_s * random.uniform(0.5, 1.5)
    return faults


def _dealt(cards: Sequence[tuple[str, str]], random: Random) -> Iterator[tuple[str, str]]:
    while True:
        yield from random.sample(cards, len(cards))
