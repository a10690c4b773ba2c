"""Which instances can be relied on: by when they were last heard, and what they said. Pure."""

from __future__ import annotations

AILMENTS = ("hung", "failed")
"""States of load reports under which an instance's requests had better run elsewhere."""


class Health:
    """Instances that are connected, by id.

    Silence is counted in time during which we listen: when this process itself stood still
    for a while, what was said meanwhile is still to be heard, and nobody was silent.
    """

    def __init__(self, silent_after_s: float, period_s: float, now: float) -> None:
        """period_s: time between two ticks; now: in any clock, as for `tick`."""
        self._silent_after_s = silent_after_s
        self._period_s = period_s
        self._ticked = now
        self._listened = 0.0
        self._heard: dict[str, float] = {}
        self._said: dict[str, str] = {}

    def tick(self, now: float) -> None:
        """To be called every `period_s`. Much later: then we slept, and count one period or two."""
        self._listened += min(now - self._ticked, 2 * self._period_s)
        self._ticked = now

    def join(self, instance: str) -> None:
        """Listen to it from now on."""
        self._heard[instance] = self._listened
        self._said[instance] = ""

    def leave(self, instance: str) -> None:
        """Don't listen to it any more. Unknown ones are ignored."""
        self._heard.pop(instance, None)
        self._said.pop(instance, None)

    def heard(self, instance: str) -> None:
        """It said something. Unknown ones are ignored."""
        if instance in self._heard:
            self._heard[instance] = self._listened

    def said(self, instance: str, state: str) -> None:
        """The state in its load report."""
        if instance in self._said:
            self._said[instance] = state

    def __contains__(self, instance: str) -> bool:
        return instance in self._heard

    def silence_s(self) -> dict[str, float]:
        """For how long each has been silent, up to a period more than it was."""
        return {instance: self._listened - heard for instance, heard in self._heard.items()}

    def state(self, instance: str) -> str:
        """What it last said of itself; empty before. KeyError: unknown."""
        return self._said[instance]

    def ailment(self, instance: str) -> str:
        """silent, hung or failed; empty for one that can be relied on. KeyError: unknown."""
        if self._listened - self._heard[instance] > self._silent_after_s:
            return "silent"
        return self._said[instance] if self._said[instance] in AILMENTS else ""
