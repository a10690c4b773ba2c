"""Asks for tokens for calls whose keys have a quota, over the socket of who grants them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence

from kvmig.accounts.allowances import TokenAllowance
from kvmig.asgi.call import HttpCall
from kvmig.controlplane.messages import OutputSpan
from kvmig.core.background import cancel_tasks
from kvmig.core.errors import NoInstance, QuotaUsedUp
from kvmig.frontend.grant_link import AWAY, GrantLink
from kvmig.frontend.meter import UsageMeter
from kvmig.frontend.ports import OutputItem

Output = tuple[str, OutputSpan, OutputItem]
"""An instance's, as it came."""


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
        self._link = GrantLink(path, source, meter.model)
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
        self._link.close()

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
            granted = await self._link.ask_for_tokens(
                allowance.seq,
                allowance.key,
                allowance.began,
                least=least,
                want=max(least, allowance.wanted()),
            )
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
