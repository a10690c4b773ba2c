"""Which way the rest of one request goes: what both engines can do, and what that would cost."""

from __future__ import annotations

from kvmig.engines.base import Engine
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

    def choose(
        self, num_tokens: int, sent: int, decoding: bool, there: Reserved, may_follow: bool
    ) -> PauseCost:
        """Of a request of so many tokens, if all but the first `sent` blocks were the rest.

        there: the destination's newest answer.
        """
        layout = self._engine.layout
        tokens = num_tokens - sent * layout.block_tokens
        ways: list[Way] = ["copy"]
        # Where no token is waited for the copy delays nobody. A request without any KV would have
        # to wait like a new one.
        if decoding and there.can_recompute and sent > 0 and tokens <= MOST_TOKENS:
            ways.append("recompute")
        follows = there.can_follow and self._engine.can_follow and self._config.max_stages > 0
        if decoding and may_follow and follows:
            ways.append("follow")
        return choose(
            self._experience.tail_ms(layout.block_bytes),
            there.cadence.token_ms,
            tokens,
            ways,
            self._config.rest,
        )
