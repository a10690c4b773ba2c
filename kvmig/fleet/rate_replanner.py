"""Measures at which rates a placement's models get requests, and plans it again for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.errors import ConfigError
from kvmig.fleet.autoscale import STABLE_S
from kvmig.placement.file import UnitPlacement
from kvmig.placement.rates import MeasuredRates
from kvmig.placement.replan import ReplanRule, ReplanVerdict, replanned

LATE_S = 3.0
"""Time after which all proxies have reported what has come."""
AGAIN_S = 30.0
"""Most seconds between two plans while rates differ from those that were planned for."""

log = logging.getLogger(__name__)

RateOf = Callable[[str, float, float], float]
"""Arrivals per second of a model: its name, until when, and over how many seconds."""


class RateReplanner:
    """One rule's; `replan` is called again and again."""

    def __init__(self, rule: ReplanRule, rate_of: RateOf, clock: TimeSource = monotonic) -> None:
        self.rule = rule
        """The rule with the rates for which the placement that is stored was planned."""
        self.verdict = ""
        """What came of the last plan; empty: there was none."""
        self._rate_of = rate_of
        self._clock = clock
        self._rates = MeasuredRates(rule.span_s)
        self._confirming = False
        """Whether rates are measured from a change on."""
        self._measured_at = clock()
        self._plan_at = 0.0

    def rates(self) -> dict[str, float]:
        """Requests per second, by model."""
        return self._rates.rates()

    async def replan(
        self, placement: UnitPlacement, start_s: Mapping[str, float]
    ) -> tuple[UnitPlacement, ReplanRule] | None:
        """Another placement with its rule, if requests come at other rates and it is worth the way
        there. `take_rule` once it is stored; one that is not is planned again.

        Rates that have changed are measured once more from then on: a short burst is over until
        that is done, and a plan is for the new rates alone.
        """
        self._measure()
        if not self._rates.settled:
            return None
        now, rule = self._clock(), self.rule
        changed = self._rates.changed(rule.planned, rule.change)
        if not changed:
            self._confirming = False
            return None
        if not self._confirming:
            self._confirming, self._rates = True, MeasuredRates(rule.span_s)
            return None
        if now < self._plan_at:
            return None
        self._plan_at = now + min(AGAIN_S, rule.span_s)
        rates = self._rates.rates()
        found = await asyncio.to_thread(_verdict, placement, rule, rates, start_s)
        self._say(f"rates changed of {', '.join(changed)}: {found.why}")
        return None if found.placement is None else (found.placement, rule.planned_for(rates))

    def take_rule(self, rule: ReplanRule) -> None:
        """Go on from a placement that was planned and is stored. rule: of that."""
        self._plan_at = self._clock() + rule.horizon_s
        self._confirming, self.rule = False, rule

    def _say(self, verdict: str) -> None:
        if verdict != self.verdict:
            log.info("placement: %s", verdict)
        self.verdict = verdict

    def _measure(self) -> None:
        """Add what the proxies have reported since the last time."""
        now = self._clock()
        seconds = min(now - self._measured_at, STABLE_S)
        self._measured_at = now
        if seconds > 0:
            came = {
                one.name: seconds * self._rate_of(one.name, now - LATE_S, seconds)
                for one in self.rule.models
            }
            self._rates.add(came, seconds)


def _verdict(
    placement: UnitPlacement,
    rule: ReplanRule,
    rates: Mapping[str, float],
    start_s: Mapping[str, float],
) -> ReplanVerdict:
    try:
        return replanned(placement, rule, rates, start_s)
    except ConfigError as error:  # at these rates the costs say that what runs can't
        return ReplanVerdict(None, str(error))
