"""What an engine is doing now: one step, or several alike that nothing interrupts."""

from __future__ import annotations

import math


class Steps:
    """`count` steps from `begin`; the i-th takes first + i * growth seconds (i from 0).

    Example: first 10 ms, growth 1 ms: steps end after 10, 21, 33 ... ms.
    """

    __slots__ = ("begin", "count", "first", "growth")

    def __init__(self, begin: float, first: float, growth: float = 0.0, count: int = 1) -> None:
        self.begin = begin
        self.first = first
        self.growth = growth
        self.count = count

    def end_of(self, steps: int) -> float:
        """When so many of them are done."""
        return self.begin + steps * self.first + self.growth * (steps * (steps - 1) / 2)

    @property
    def end(self) -> float:
        """When all are done."""
        return self.end_of(self.count)

    def done_at(self, now: float) -> int:
        """How many are done at `now`."""
        if now < self.end_of(1):
            return 0
        elapsed = now - self.begin
        half = self.growth / 2
        linear = self.first - half
        if half * elapsed > 1e-12:
            guess = int((math.sqrt(linear * linear + 4 * half * elapsed) - linear) / (2 * half))
        else:
            guess = int(elapsed / self.first)
        guess = min(guess, self.count)
        while guess < self.count and self.end_of(guess + 1) <= now:
            guess += 1
        while guess and self.end_of(guess) > now:
            guess -= 1
        return guess

    def cut(self, now: float) -> bool:
        """End with the step that runs at `now`; whether that is earlier than before."""
        done = self.done_at(now)
        begun = max(1, done if self.end_of(done) == now else done + 1)
        if begun >= self.count:
            return False
        self.count = begun
        return True
