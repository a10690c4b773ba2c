"""A session of several turns on two real engines, which moves between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmig.engines.base import CameBlocks, EndedRequest, RequestExport
from tests.support.vllm_pair import SEEDED, Pair
from tests.support.vllm_side import Output, Side

PROMPT = [40 + number * number % 90 for number in range(220)]
MORE = [70 + number * 7 % 40 for number in range(30)]
"""What the user says next."""
BLOCK = 32


class Talk:
    """One session: its last request's payload, and all its tokens."""

    def __init__(
        self,
        pair: Pair,
        salt: str | None = None,
        prompt: Sequence[int] = PROMPT,
        **params: Any,
    ) -> None:
        """prompt: of its first turn. params: of each turn's request, see `Pair.submit`."""
        self.pair = pair
        self.given = {"salt": salt, "max_tokens": 40, **SEEDED, **params}
        self.prompt = list(prompt)
        self.said: list[int] = []
        self.payload: list[bytes] = []
        self.turns = 0

    async def turn(self, side: Side) -> Output:
        """The next answer, computed at `side`."""
        if self.said:
            self.prompt = [*self.prompt, *self.said, *MORE]
        name, self.turns = f"turn {self.turns}", self.turns + 1
        self.pair.submit(side, name, self.prompt, **self.given)
        self.payload = side.incoming.submitted[name]
        output = await self.pair.finish(name)
        await self.pair.idle()
        self.said = output.tokens
        return self.pair.outputs.pop(name)

    async def move(self, source: Side, to: Side, shared_tokens: int = 0) -> int:
        """The whole of it, as a migration's sessions do it; how many blocks were a hit."""
        pair = self.pair
        export = await self.held(source, shared_tokens)
        sent = hit = await pair.done(to.engine.reserve(export))
        stage = await pair.done(source.engine.stage("s", sent))
        blocks = await pair.done(to.engine.grow("s", stage.num_tokens))
        live = stage.block_ids[:-1]
        await pair.copy(source, to, live, [blocks[at] for at in stage.places[:-1]])
        sent += len(live)
        await pair.done(to.engine.grow("s", stage.num_tokens))
        tail = await pair.done(source.engine.suspend("s", sent))
        buffer = memoryview(bytearray(source.engine.layout.block_bytes * len(tail.block_ids)))
        sums = await pair.done(source.engine.gather(tail.block_ids, buffer))
        into = [blocks[at] for at in tail.places]
        last = CameBlocks(sent, into, buffer, sums) if sums else None
        await pair.done(to.engine.commit("s", tail, last))
        await pair.done(source.engine.release("s"))
        return hit

    async def held(self, source: Side, shared_tokens: int = 0) -> RequestExport:
        """Its blocks are held from now on, and this is what the destination gets."""
        ended = EndedRequest(self.payload, self.said, shared_tokens)
        await self.pair.done(source.engine.hold_session("s", ended))
        return await self.pair.done(source.engine.export("s"))

    @property
    def whole(self) -> int:
        """Tokens of its full blocks; what the last step gave was never computed."""
        return (len(self.prompt) + len(self.said) - 1) // BLOCK * BLOCK


def found(output: Output) -> int:
    """Tokens of its prompt that were cached."""
    return output.cached_tokens


def cached(side: Side) -> int:
    """Blocks that some prompt may find."""
    pool = side.scheduler.kv_cache_manager.block_pool
    return sum(block.block_hash is not None for block in pool.blocks)


async def stayed(pair: Pair, turns: int, **params: Any) -> list[Output]:
    """The turns of a session that never moves; nothing of them is cached afterwards."""
    talk = Talk(pair, **params)
    outputs = [await talk.turn(pair.a) for _ in range(turns)]
    pair.a.scheduler.reset_prefix_cache()
    return outputs
