"""Which way the rest of one request goes: what both engines can do, and what that would cost."""

from __future__ import annotations

from kvmig.engines.base import Engine, Stage
from kvmig.ground.config import MigrationConfig, Way
from kvmig.kvtransfer.experience import Experience
from kvmig.kvtransfer.messages import Reserved
from kvmig.kvtransfer.pause_cost import MOST_TOKENS, PauseCost, choose


class RestChoice:
    """Of one migration out of `engine`."""

    def __init__(self, engine: Engine, config: MigrationConfig, experience: Experience) -> None:
        self._engine = engine
        self._config = config
        self._experience = experience

    def choose(self, plan: Stage, sent: int, there: Reserved) -> PauseCost:
        """If `plan` is the rest; there: the destination's newest answer."""
        layout = self._engine.layout
        tokens = plan.num_tokens - sent * layout.block_tokens
        return choose(
            self._experience.tail_ms(layout.block_bytes),
            there.cadence.token_ms,
            tokens,
            self._open_ways(plan, sent, tokens, there),
            self._config.rest,
        )

    def _open_ways(self, plan: Stage, sent: int, tokens: int, there: Reserved) -> list[Way]:
        ways: list[Way] = ["copy"]
        if not plan.decoding:
            return ways  # no token is waited for
        # A request without any KV would have to wait like a new one.
        if there.can_recompute and sent > 0 and tokens <= MOST_TOKENS:
            ways.append("recompute")
        if there.can_follow and self._engine.can_follow and self._config.max_stages > 0:
            ways.append("follow")
        return ways
