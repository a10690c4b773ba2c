"""What an engine has of one session: blocks by name, who holds them, and what is in them.

A small model of vLLM's prefix cache, and of what `kvmig.engines.vllm.cached_prefixes` does with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmig.kvtransfer.messages import Chunk
from kvmig_tools.check.engine import Engine
from kvmig_tools.check.part import Violation

BLOCKS = 2
"""Of the session: more than go with a tail."""
POOL = 2 * BLOCKS
"""Room for the session's move and its next turn, which may share nothing."""
OTHERS = -1


@dataclass
class Block:
    """holders: who keep it from being used anew. content: whose KV is in it, name: whose prompts
    find it: the number of a block of the session, or OTHERS."""

    holders: int = 0
    content: int = OTHERS
    name: int = OTHERS


class PrefixCache:
    """All blocks of one engine."""

    def __init__(self) -> None:
        self.blocks = [Block() for _ in range(POOL)]
        self.evicted = False
        """Whether others ever needed the room of some of the session's."""

    @property
    def state(self) -> str:
        """What prompts find of the session: "whole", or not; "evicted": that is others' doing."""
        names = {block.name for block in self.blocks}
        return "evicted" if self.evicted else "whole" if names >= {*range(BLOCKS)} else ""

    @property
    def held(self) -> int:
        """Blocks that somebody holds."""
        return sum(block.holders > 0 for block in self.blocks)

    def find(self) -> list[int]:
        """Ids of the session's first blocks; now held once more."""
        ids: list[int] = []
        for number in range(BLOCKS):
            found = [at for at, block in enumerate(self.blocks) if block.name == number]
            if not found:
                break
            if self.blocks[found[0]].content != number:
                raise Violation("a prompt finds a block that holds something else")
            ids.append(found[0])
        for at in ids:
            self.blocks[at].holders += 1
        return ids

    def take(self, count: int) -> list[int]:
        """Ids of blocks that nobody holds: of nobody's prompt first. Now held, with others' KV."""
        free = [at for at, block in enumerate(self.blocks) if not block.holders]
        free.sort(key=lambda at: self.blocks[at].name)
        if len(free) < count:
            raise Violation("blocks are held that nobody needs: there is no room")
        for at in free[:count]:
            self.evicted = self.evicted or self.blocks[at].name != OTHERS
            self.blocks[at] = Block(holders=1)
        return free[:count]

    def free(self, ids: Sequence[int]) -> None:
        """They are held once less."""
        for at in ids:
            self.blocks[at].holders -= 1
            if self.blocks[at].holders < 0:
                raise Violation("a block is freed that nobody holds")

    def enter(self, ids: Sequence[int], first: int = 0) -> None:
        """Let prompts find the session's blocks from `first` on here."""
        for number, at in list(enumerate(ids))[first:]:
            if self.blocks[at].content != number:
                raise Violation(f"prompts are to find block {number}, which has not come")
            self.blocks[at].name = number

    def fill(self, ids: Sequence[int]) -> None:
        """The session's KV is computed here, and found from now on."""
        for number, at in enumerate(ids):
            self.blocks[at].content = number
        self.enter(ids)

    def forget(self, ids: Sequence[int]) -> None:
        """Let no prompt find these, except for those that others hold, too."""
        for at in ids:
            if self.blocks[at].holders == 1:
                self.blocks[at].name = OTHERS

    def make_way(self) -> None:
        """Others use all that nobody holds."""
        for block in self.blocks:
            if not block.holders:
                self.evicted = self.evicted or block.name != OTHERS
                block.name = block.content = OTHERS


@dataclass
class ArrivingBlocks:
    """hits: the first of them, which were found here."""

    ids: list[int]
    hits: int


class SessionEngine(Engine):
    """An engine's requests are turns of the session; leaving, arriving: by the move's id."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.turns: dict[str, list[int]] = {}
        self.leaving: dict[str, list[int]] = {}
        self.arriving: dict[str, ArrivingBlocks] = {}

    # -- turns

    def begin_turn(self, run: str) -> None:
        """Find what is cached of it, and take blocks for the rest."""
        found = self.cache.find()
        self.turns[run] = found + self.cache.take(BLOCKS - len(found))

    def end_turn(self, run: str) -> None:
        """It is computed, and cached."""
        ids = self.turns.pop(run)
        self.cache.fill(ids)
        self.cache.free(ids)

    def abort(self, run: str) -> None:
        """See `Engine`."""
        super().abort(run)
        self.cache.free(self.turns.pop(run, ()))

    # -- the source's

    def hold(self, move: str) -> bool:
        """Hold what is cached; whether anything is."""
        found = self.cache.find()
        if found:
            self.leaving[move] = found
        return bool(found)

    def check_content(self, move: str) -> None:
        """What is copied is the session's."""
        for number, at in enumerate(self.leaving.get(move, ())):
            if self.cache.blocks[at].content != number:
                raise Violation("blocks are copied that others have meanwhile")

    def keep(self, move: str) -> None:
        """Hold nothing any more: the session stays."""
        self.cache.free(self.leaving.pop(move, ()))

    def release(self, move: str) -> None:
        """The session is given up."""
        self.cache.forget(self.leaving.get(move, ()))
        self.keep(move)

    # -- the destination's

    def reserve(self, move: str) -> int:
        """Take room for all of it; how many blocks are here."""
        found = self.cache.find()
        ids = found + self.cache.take(BLOCKS - len(found))
        self.arriving[move] = ArrivingBlocks(ids, len(found))
        return len(found)

    def write(self, move: str, chunk: Chunk) -> None:
        """Blocks came."""
        ids = self.arriving[move].ids
        for number in range(chunk.first, chunk.first + len(chunk.checksums)):
            self.cache.blocks[ids[number]].content = number

    def commit_session(self, move: str, last: Chunk | None) -> None:
        """All of it has come: cached, and free."""
        if last is not None:
            self.write(move, last)
        arriving = self.arriving[move]
        self.cache.enter(arriving.ids, arriving.hits)
        self.cancel(move)

    def cancel(self, run: str) -> None:
        """See `Engine`; of a session's move."""
        arriving = self.arriving.pop(run, None)
        if arriving is not None:
            self.cache.free(arriving.ids)
