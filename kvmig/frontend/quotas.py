"""Asks for tokens for calls whose keys have a quota, over the socket of who grants them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence

import msgspec

from kvmig.accounts.allowances import TokenAllowance, TokenGrant, TokenRequest
from kvmig.asgi.call import HttpCall
from kvmig.controlplane.messages import Span
from kvmig.core.background import cancel_tasks
from kvmig.core.errors import NoInstance, QuotaUsedUp
from kvmig.frontend.meter import UsageMeter
from kvmig.frontend.ports import OutputItem

ANSWER_S = 5.0
"""Timeout of one answer; the question is then asked again on another connection."""
PATIENCE_S = 20.0
"""Time that tokens are held for their grant, and that a new call waits for its first."""
RETRY_S = 0.2
RESERVED_S = 3.0
"""Wait for what others have reserved: a call that ends gives back what it hasn't used within some
two seconds."""
AGAIN_S = 0.5

AWAY = "nobody grants tokens of the API key's quota now, try again"

Output = tuple[str, Span, OutputItem]
"""An instance's, as it came."""

log = logging.getLogger(__name__)


class QuotaClient:
    """The quotas' client of one front end. Make it inside a running event loop; `close` it."""

    def __init__(
        self, meter: UsageMeter, source: str, path: str, cut: Callable[[OutputItem, int], None]
    ) -> None:
        """source: the front end's name in usage records. path: of the socket.

        cut: leaves the first tokens of an item.
        """
        self._cut = cut
        self.meter = meter
        self._source = source
        self._path = path
        self._numbers = itertools.count(1)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()
        self._asks: dict[TokenAllowance[Output], asyncio.Task[None]] = {}
        self.release: Callable[[Output], None] = lambda _: None
        """Takes what was held, once it is paid for."""
        self.end: Callable[[Sequence[Output], TokenAllowance[Output]], None] = lambda _, __: None
        """Ends the requests of what can't be paid for; the allowance has the reason."""

    async def begin(
        self, call: HttpCall, prompt: Hashable, prompt_tokens: int, most: int | None
    ) -> TokenAllowance[Output] | None:
        """What pays for the prompt and its answer's tokens; None: the key has no quota.

        prompt: names it; several answers may have it. most: tokens of the answer; None: unknown.
        Raises QuotaUsedUp, or NoInstance while none are granted.
        """
        if not call.quota:
            return None
        seq, began = self.meter.enter(call)
        if call.allowance is None or call.allowance.seq != seq:
            call.allowance = TokenAllowance(call.account, seq, began)
        allowance: TokenAllowance[Output] = call.allowance
        allowance.expect(most)
        if prompt in allowance.prompts:
            return allowance
        allowance.prompts.add(prompt)
        ahead = 0 if most == 0 else 1
        wanted = prompt_tokens + ahead
        allowance.await_prompt(wanted)
        try:
            while not allowance.pay_prompt(prompt_tokens, ahead):
                if allowance.refused:
                    raise (NoInstance if allowance.away else QuotaUsedUp)(allowance.refused)
                await asyncio.shield(self._asked(allowance, wanted - allowance.spare))
        finally:
            allowance.end_prompt(wanted)
        return allowance

    def want_more(self, allowance: TokenAllowance[Output]) -> None:
        """Ask ahead, or for what is held; what was refused before ends now."""
        if allowance.refused:
            self.end(allowance.give_up(), allowance)
        else:
            self._asked(allowance, 1)

    async def close(self) -> None:
        """Ask nothing more."""
        tasks = list(self._asks.values())
        await cancel_tasks(*tasks)
        self._drop()

    def _asked(self, allowance: TokenAllowance[Output], least: int) -> asyncio.Task[None]:
        """What asks for the call's next tokens, one after the other."""
        task = self._asks.get(allowance)
        if task is None:
            allowance.asking = True
            task = asyncio.create_task(self._more(allowance, least), name="quota")
            self._asks[allowance] = task
        return task

    async def _more(self, allowance: TokenAllowance[Output], least: int) -> None:
        try:
            granted = await self._ask(allowance, least)
        finally:
            allowance.asking = False
            del self._asks[allowance]
        if granted is not None and granted.tokens:
            for output in allowance.grow(granted.tokens):
                self.release(output)
            if allowance.waiting:
                self.want_more(allowance)
            return
        allowance.away = granted is None
        allowance.refused = AWAY if granted is None else granted.why
        part, held = allowance.give_part(), allowance.give_up()
        if part:  # of an output that has more tokens
            self._cut(held[0][2], part)
            self.release(held[0])
        self.end(held, allowance)

    async def _ask(self, allowance: TokenAllowance[Output], least: int) -> TokenGrant | None:
        """The answer; None if there is none in PATIENCE_S."""
        clock = asyncio.get_running_loop().time
        reserved_until = clock() + RESERVED_S
        ask = TokenRequest(
            number=next(self._numbers),
            source=self._source,
            seq=allowance.seq,
            key=allowance.key,
            began=allowance.began,
            least=least,
            want=max(least, allowance.wanted()),
            model=self.meter.model,
        )
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
