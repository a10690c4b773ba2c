"""The connection to the fleet's server, which grants tokens of keys' quotas."""

from __future__ import annotations

import asyncio
import itertools
import logging

import msgspec

from kvmig.accounts.allowances import TokenGrant, TokenRequest

ANSWER_S = 5.0
"""Timeout of one answer; the question is then asked again on another connection."""
PATIENCE_S = 20.0
"""Time that tokens are held for their grant, and that a new call waits for its first."""
RETRY_S = 0.2
RESERVED_S = 3.0
"""Wait for what others have reserved: a call that ends gives back what it hasn't used within some
two seconds."""
AGAIN_S = 0.5

AWAY = "no tokens of the API key's quota can be granted now, try again"

log = logging.getLogger(__name__)


class GrantLink:
    """The connection of one front end; `close` it."""

    def __init__(self, path: str, source: str, model: str) -> None:
        """path: of the socket. source: the front end's name in usage records. model: the model's
        there."""
        self._path = path
        self._source = source
        self._model = model
        self._numbers = itertools.count(1)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def ask_for_tokens(
        self, seq: int, key: str, began: float, *, least: int, want: int
    ) -> TokenGrant | None:
        """The answer for a call (see `TokenRequest`); None if there is none in PATIENCE_S."""
        number = next(self._numbers)
        ask = TokenRequest(number, self._source, seq, key, began, least, want, self._model)
        clock = asyncio.get_running_loop().time
        reserved_until = clock() + RESERVED_S
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with self._turn:
                        answer = await self._say(ask)
                    if answer is None:
                        await asyncio.sleep(RETRY_S)
                    elif answer.again and clock() < reserved_until:
                        await asyncio.sleep(AGAIN_S)
                    else:
                        return answer
        except TimeoutError:
            return None

    def close(self) -> None:
        """Disconnect."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _say(self, ask: TokenRequest) -> TokenGrant | None:
        """One attempt."""
        try:
            async with asyncio.timeout(ANSWER_S):
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(self._path)
                reader, writer = self._streams
                writer.write(msgspec.json.encode(ask) + b"\n")
                answer = msgspec.json.decode(await reader.readline(), type=TokenGrant)
        except (OSError, msgspec.DecodeError) as error:  # a TimeoutError too
            log.warning("quota: %s: %s", self._path, str(error) or "no answer")
            self.close()
            return None
        except asyncio.CancelledError:
            self.close()  # an answer may be on its way
            raise
        if answer.number != ask.number:
            self.close()
            return None
        return answer
