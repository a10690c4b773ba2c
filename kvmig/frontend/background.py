"""Work that goes on after its call was answered, as responses in the background do.

A fleet's proxy decides what a key may do, and counts what it does. So its connection stays open
until the work has ended, though the answer is complete long before; and the work ends when the
proxy leaves. So all that ends a call ends its work, whichever of the two processes dies.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Send

from kvmig.asgi.call import HttpCall

END_S = 5.0
"""Time for cancelled work to end."""


class OpenAnswer:
    """Sends one call's answer, whose end waits for the call's work."""

    def __init__(self, call: HttpCall, send: Send) -> None:
        self._call = call
        self._send = send
        self._open = False

    async def send(self, message: Message) -> None:
        """Send on; that it was the last message is kept back while the work goes on."""
        ends = message["type"] == "http.response.body" and not message.get("more_body")
        if ends and self._works():
            self._open = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def wait(self, receive: Receive) -> None:
        """Wait for the work's end, also at the proxy's leaving; then end the answer."""
        work = self._call.background
        if work is None or not self._call.account:
            return
        ended = asyncio.Event()
        work.add_done_callback(lambda _: ended.set())
        waits = [asyncio.create_task(_until_left(receive)), asyncio.create_task(ended.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self._call.end_background()
            await asyncio.wait(waits[1:], timeout=END_S)
        finally:
            for one in waits:
                one.cancel()
        if self._open:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _works(self) -> bool:
        """Whether the call comes from a fleet's proxy, and work of it still runs."""
        work = self._call.background
        return bool(self._call.account) and work is not None and not work.done()


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
