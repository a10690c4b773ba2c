"""The choices of one call (`n`): generations that run beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvmig.openai_server.generation import Generation, Piece


class Choices:
    """`begin`, then `pieces`; `close` in any case."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._counts = [0] * len(generations)
        self._waiting: dict[asyncio.Future[Piece], int] = {}

    def __len__(self) -> int:
        return len(self._generations)

    @property
    def tokens(self) -> int:
        """That all have put out."""
        return sum(self._counts)

    async def begin(self) -> None:
        """Raises Failed if there is no instance to run one of them."""
        for generation in self._generations:
            await generation.begin()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece), as they come, to the last one's end. Raises Failed."""
        if len(self) == 1:  # nearly always: no task for each piece
            ended = False
            while not ended:
                piece = await self._generations[0].next()
                self._counts[0], ended = piece.tokens, piece.finish_reason is not None
                yield 0, piece
            return
        for choice in range(len(self)):
            self._ask(choice)
        while self._waiting:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=self._waiting.__getitem__):
                choice = self._waiting.pop(future)
                piece = future.result()
                self._counts[choice] = piece.tokens
                if piece.finish_reason is None:
                    self._ask(choice)
                yield choice, piece

    async def close(self) -> None:
        """Nobody wants more of them. May be called twice."""
        # First, and nothing else is waited for: the caller may be cancelled at each wait.
        for generation in self._generations:
            await generation.close()
        for future in self._waiting:
            if not future.cancel() and not future.cancelled():
                future.exception()  # that of another choice was told
        self._waiting.clear()

    def _ask(self, choice: int) -> None:
        self._waiting[asyncio.ensure_future(self._generations[choice].next())] = choice
