"""What a call is answered with that doesn't go on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from kvmig.accounts.keys import KeyDenied


class ProxyRefusal(Exception):
    """The call is answered with this. code: OpenAI's word for it.

    again_s: until another try makes sense; None: it doesn't. headers: more of them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        again_s: float | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.again_s = again_s
        self.headers = headers


class CallNotTaken(Exception):
    """The deployment stops and has not looked at the call: another one can serve it."""


def bad(message: str, code: str = "invalid_request") -> ProxyRefusal:
    """400."""
    return ProxyRefusal(HTTPStatus.BAD_REQUEST, message, code)


def refused(denied: KeyDenied) -> ProxyRefusal:
    """What a key's check says."""
    return ProxyRefusal(denied.status, denied.message, denied.code)
