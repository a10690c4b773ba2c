"""Forms that create something, each carried out once.

A double click, or a page that is loaded again after a form, sends the same form again. The browser
shows the last answer only, so each has the first one's: it may hold a key that is shown this once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from hashlib import blake2b
from http import HTTPStatus
from typing import Generic, NamedTuple, TypeVar

from kvmig.core.clock import TimeSource, monotonic
from kvmig.pages.api_calls import CALL_S, ApiRefusal

ONCE = "once"
"""Name of the form field with the token of one form of one page."""
KEPT_S = 600.0
"""Time for which the answer to a form is kept."""
USED_S = 12 * 3600.0
"""Time for which it is known that a form was sent: longer than a session lives."""
MOST_USED = 10_000
"""Forms of which that is known; of more the oldest are forgotten."""

Answer = TypeVar("Answer")


class SentForm(NamedTuple, Generic[Answer]):
    """A form that was sent."""

    at: float
    """Steady time."""
    answer: asyncio.Future[Answer]
    """What came of it; a cancelled one was refused."""


class SentForms(Generic[Answer]):
    """The forms that were sent to this process."""

    def __init__(self, clock: TimeSource = monotonic) -> None:
        self._clock = clock
        self._process = secrets.token_hex(8)
        self._sent: dict[bytes, SentForm[Answer] | float] = {}
        """What was sent by digests of forms, the oldest first; a number: when, and without its
        answer."""

    def new_token(self) -> str:
        """A token for the forms of a page that is made now."""
        return f"{self._process}.{secrets.token_urlsafe(12)}"

    async def carry_out(
        self,
        whose: str,
        path: str,
        token: str,
        fields: Iterable[tuple[str, str]],
        act: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        """What came of the form, which is carried out unless it was before. One with other fields
        is another one, and so is one that was refused.

        whose: the session's key. token: empty: each is carried out. Raises what `act` raises, and
        ApiRefusal for a page from before the server's start, or a form of long ago.
        """
        if not token:
            return await act()
        if token.partition(".")[0] != self._process:
            sentence = (
                "the server has started again since this page was loaded: look whether the form was"
                " carried out before, then send it again"
            )
            raise ApiRefusal(HTTPStatus.CONFLICT, sentence)
        key = digest((whose, path, token), fields)
        self._forget()
        while (before := self._sent.get(key)) is not None:
            if isinstance(before, float):
                sentence = "this form was carried out before: its answer is not kept any more"
                raise ApiRefusal(HTTPStatus.CONFLICT, sentence)
            await asyncio.wait([before.answer], timeout=CALL_S)
            if not before.answer.done():
                sentence = "this form is being carried out: load the page again"
                raise ApiRefusal(HTTPStatus.CONFLICT, sentence)
            if not before.answer.cancelled():
                return before.answer.result()
        mine = SentForm(self._clock(), asyncio.get_running_loop().create_future())
        self._sent[key] = mine
        try:
            found = await act()
        except BaseException:
            del self._sent[key]
            mine.answer.cancel()
            raise
        mine.answer.set_result(found)
        return found

    def _forget(self) -> None:
        now = self._clock()
        for key, one in list(self._sent.items()):
            at = one if isinstance(one, float) else one.at
            if now - at > USED_S or len(self._sent) > MOST_USED:
                del self._sent[key]
            elif now - at <= KEPT_S:
                break
            elif not isinstance(one, float) and one.answer.done():
                self._sent[key] = one.at


def digest(about: Iterable[str], fields: Iterable[tuple[str, str]]) -> bytes:
    """A digest of a form."""
    found = blake2b(digest_size=32)
    for text in (*about, *(text for pair in fields for text in pair)):
        raw = text.encode()
        found.update(len(raw).to_bytes(8) + raw)
    return found.digest()
