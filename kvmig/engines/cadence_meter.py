"""How long an engine's steps take, and when the next one ends: pure, times are passed in."""

from __future__ import annotations

from kvmig.engines.base import Cadence

WEIGHT = 0.2
"""Of a new step in an average."""
IDLE_STEPS = 3.0
"""An engine that has made no step for so many of its steps' time does nothing."""
MOST_TOKENS = 64
"""Steps of more tokens tell nothing of what one token more costs beside a decode."""


class _Mean:
    """An exponential average."""

    def __init__(self, value: float) -> None:
        self.value = value

    def add(self, value: float) -> None:
        self.value += WEIGHT * (value - self.value)


class CadenceMeter:
    """Steps of one engine, told one after the other. Times in seconds."""

    def __init__(self) -> None:
        self._ended: float | None = None
        self._period_ms: _Mean | None = None
        self._by_size: dict[int, tuple[_Mean, _Mean]] = {}

    def step(self, began: float, ended: float, tokens: int) -> None:
        """A step computed `tokens` tokens of all its requests together."""
        ms = (ended - began) * 1e3
        if self._period_ms is None:
            self._period_ms = _Mean(ms)
        elif self._ended is not None:
            # What the engine does between two steps counts, unless it had nothing to do.
            pause_ms = (began - self._ended) * 1e3
            self._period_ms.add(ms + (pause_ms if pause_ms < self._period_ms.value else 0.0))
        self._ended = ended
        if not 0 < tokens <= MOST_TOKENS:
            return
        size = tokens.bit_length()
        if size in self._by_size:
            mean_tokens, mean_ms = self._by_size[size]
            mean_tokens.add(tokens)
            mean_ms.add(ms)
        else:
            self._by_size[size] = _Mean(tokens), _Mean(ms)

    def cadence(self, now: float) -> Cadence:
        """As seen at `now`."""
        token_ms = self._token_ms()
        if self._ended is None or self._period_ms is None:
            return Cadence(0.0, 0.0, token_ms)
        since_ms, step_ms = max(0.0, (now - self._ended) * 1e3), self._period_ms.value
        if since_ms > IDLE_STEPS * step_ms:
            return Cadence(since_ms, 0.0, token_ms)
        return Cadence(since_ms, step_ms, token_ms)

    def _token_ms(self) -> float | None:
        """Slope of a line through the averages of steps of about equally many tokens."""
        points = [(tokens.value, ms.value) for tokens, ms in self._by_size.values()]
        if len(points) < 2:
            return None
        tokens_mean = sum(tokens for tokens, _ in points) / len(points)
        ms_mean = sum(ms for _, ms in points) / len(points)
        spread = sum((tokens - tokens_mean) ** 2 for tokens, _ in points)
        slope = sum((tokens - tokens_mean) * (ms - ms_mean) for tokens, ms in points) / spread
        return max(0.0, slope)
