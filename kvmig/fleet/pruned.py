"""Which calls had a row in the ledger that was deleted since: they are over, and are counted.

A front end numbers its calls one by one, and their rows go in about that order: so this is a row or
two of each front end, however many calls it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import delete, insert, select
from sqlalchemy.engine import Connection

from kvmig.fleet.tables import usage_pruned

Run = tuple[int, int]
"""The first number and the last one."""


def joined(runs: Iterable[Run], numbers: Iterable[int]) -> list[Run]:
    """The fewest runs that hold all these runs and numbers, and nothing else."""
    found: list[Run] = []
    for first, last in sorted([*runs, *((one, one) for one in numbers)]):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def remember(connection: Connection, source: str, seqs: Iterable[int]) -> None:
    """Keep that the rows of these calls of a front end are deleted."""
    table = usage_pruned
    wanted = select(table.c.first, table.c.last).where(table.c.source == source)
    before = [(first, last) for first, last in connection.execute(wanted)]
    after = joined(before, seqs)
    gone, new = set(before).difference(after), set(after).difference(before)
    if gone:
        firsts = table.c.first.in_([first for first, _ in gone])
        connection.execute(delete(table).where(table.c.source == source, firsts))
    if new:
        rows = [{"source": source, "first": first, "last": last} for first, last in new]
        connection.execute(insert(table), rows)


def among(connection: Connection, source: str, seqs: Sequence[int]) -> set[int]:
    """The calls of a front end, of these, whose rows are deleted."""
    if not seqs:
        return set()
    table = usage_pruned
    wanted = select(table.c.first, table.c.last).where(
        table.c.source == source, table.c.last >= min(seqs), table.c.first <= max(seqs)
    )
    runs = [(first, last) for first, last in connection.execute(wanted)]
    return {seq for seq in seqs if any(first <= seq <= last for first, last in runs)}
