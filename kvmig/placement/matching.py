"""An assignment of rows to columns at the least cost: the Hungarian method. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def matched(cost: Sequence[Sequence[float]]) -> list[int]:
    """Assign a column to each row of a square matrix of finite costs, each once, least in sum.

    Rows are taken one by one; each finds its way to a free column over the cheapest others, by
    Dijkstra's method over costs that the potentials keep at 0 or more: n^3 steps in all.
    """
    size = len(cost)
    of_row, of_column = [0.0] * (size + 1), [0.0] * (size + 1)  # potentials
    taken = [size] * (size + 1)  # by column: its row; column `size` is where each row starts
    for row in range(size):
        taken[size] = row
        least = [math.inf] * size
        came_from = [size] * size
        seen = [False] * (size + 1)
        column = size
        while taken[column] != size:
            seen[column] = True
            at, step, nearest = taken[column], math.inf, size
            for to in range(size):
                if seen[to]:
                    continue
                through = cost[at][to] - of_row[at] - of_column[to]
                if through < least[to]:
                    least[to], came_from[to] = through, column
                if least[to] < step:
                    step, nearest = least[to], to
            for to in range(size + 1):
                if seen[to]:
                    of_row[taken[to]] += step
                    of_column[to] -= step
                elif to < size:
                    least[to] -= step
            column = nearest
        while column != size:
            before = came_from[column]
            taken[column] = taken[before]
            column = before
    columns = [0] * size
    for column in range(size):
        columns[taken[column]] = column
    return columns
