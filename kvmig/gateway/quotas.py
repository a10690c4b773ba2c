"""Asks for tokens for calls whose keys have a quota, over the socket of who grants them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from kvmig.accounts.allowances import FIRST, NEXT, Allowance, Ask, Granted
from kvmig.controlplane.messages import Span
from kvmig.gateway.meter import Meter
from kvmig.gateway.ports import Item
from kvmig.gateway.requests import HttpCall
from kvmig.ground.errors import NoInstance, QuotaUsedUp

ANSWER_S = 5.0
"""For one answer; it is asked again on another connection."""
PATIENCE_S = 20.0
"""That tokens are held for their grant, and a new call waits for its first."""
RETRY_S = 0.2

AWAY = "nobody grants tokens of the API key's quota now, try again"

Output = tuple[str, Span, Item]
"""An instance's, as it came."""

log = logging.getLogger(__name__)


class Quotas:
    """Of one front end. Make it inside a running event loop; `close` it."""

    def __init__(
        self, meter: Meter, source: str, path: str, cut: Callable[[Item, int], None]
    ) -> None:
        """source: the front end's name in usage records. path: of the socket.

        cut: leaves the first tokens of an item.
        """
        self._cut = cut
        self._meter = meter
        self._source = source
        self._path = path
        self._numbers = itertools.count(1)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.release: Callable[[Output], None] = lambda _: None
        """Takes what was held, once it is paid for."""
        self.end: Callable[[Sequence[Output], str], None] = lambda _, __: None
        """Ends the requests of what can't be paid for, and says why."""

    async def begin(
        self, call: HttpCall, prompt: str, prompt_tokens: int
    ) -> Allowance[Output] | None:
        """What pays for the prompt (its id) and the first tokens; None: the key has no quota.

        Raises QuotaUsedUp, or NoInstance while nobody grants.
        """
        if not call.quota:
            return None
        if call.allowance is None:
            seq, began = self._meter.enter(call)
            call.allowance = Allowance(call.account, seq, began)
        allowance: Allowance[Output] = call.allowance
        if prompt in allowance.prompts:
            return allowance
        allowance.prompts.add(prompt)
        granted = await self._ask(allowance, prompt_tokens + 1, prompt_tokens + FIRST)
        if granted is None or not granted.tokens:
            self._refuse(allowance, granted)
            if granted is None:
                raise NoInstance(allowance.refused)
            raise QuotaUsedUp(allowance.refused)
        allowance.used += prompt_tokens
        for output in allowance.grow(granted.tokens):
            self.release(output)
        return allowance

    def want_more(self, allowance: Allowance[Output]) -> None:
        """Ask ahead, or for what is held; what was refused before ends now."""
        if allowance.refused:
            self.end(allowance.give_up(), allowance.refused)
            return
        if allowance.asking:
            return
        allowance.asking = True
        task = asyncio.create_task(self._more(allowance), name="quota")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ask nothing more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._drop()

    async def _more(self, allowance: Allowance[Output]) -> None:
        granted = await self._ask(allowance, 1, NEXT)
        allowance.asking = False
        if granted is not None and granted.tokens:
            for output in allowance.grow(granted.tokens):
                self.release(output)
            if allowance.waiting:
                self.want_more(allowance)
            return
        self._refuse(allowance, granted)

    def _refuse(self, allowance: Allowance[Output], granted: Granted | None) -> None:
        allowance.refused = AWAY if granted is None else granted.why
        spare, held = allowance.granted - allowance.used, allowance.give_up()
        if held and spare:  # of an output that has more tokens
            self._cut(held[0][2], spare)
            allowance.used += spare
            self.release(held[0])
        self.end(held, allowance.refused)

    async def _ask(self, allowance: Allowance[Output], least: int, want: int) -> Granted | None:
        """The answer; None if there is none in PATIENCE_S."""
        ask = Ask(
            number=next(self._numbers),
            source=self._source,
            seq=allowance.seq,
            key=allowance.key,
            began=allowance.began,
            least=least,
            want=want,
            model=self._meter.model,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with self._turn:
                        answer = await self._say(ask)
                    if answer is not None:
                        return answer
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            return None

    async def _say(self, ask: Ask) -> Granted | None:
        """One attempt."""
        try:
            async with asyncio.timeout(ANSWER_S):
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(self._path)
                reader, writer = self._streams
                writer.write(msgspec.json.encode(ask) + b"\n")
                answer = msgspec.json.decode(await reader.readline(), type=Granted)
        except (OSError, msgspec.DecodeError) as error:  # a TimeoutError too
            log.warning("quota: %s: %s", self._path, str(error) or "no answer")
            self._drop()
            return None
        except asyncio.CancelledError:
            self._drop()  # an answer may be on its way
            raise
        if answer.number != ask.number:
            self._drop()
            return None
        return answer

    def _drop(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
