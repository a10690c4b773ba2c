"""The person who looks at a page, and the token that its forms carry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvmig.accounts.page_sessions import CSRF_HEADER, LoginSession, SessionCookies


class PagePerson(msgspec.Struct, frozen=True):
    """A person who is logged in."""

    name: str
    """The user's name."""
    admin: bool
    """Whether the person may see and change everything; others see what is their user's."""
    key: str = ""
    """Prefix of the key that the person has logged in with; empty: of a deployment without
    users."""


class PageSessions(Protocol):
    """Finds the person of a request."""

    def find_person(self, request: Request) -> PagePerson | None:
        """The person whose session is valid now; None: there is no such session."""

    def csrf_token(self, request: Request) -> str:
        """The token for the forms of a page, good for this session only."""

    def check_csrf(self, request: Request, presented: str) -> None:
        """Raises HTTPException, 403, unless a form carried the session's token."""


class CookieSessions(ABC):
    """Sets cookies, and makes and checks forms' tokens, for sessions that cookies name."""

    def __init__(self, *, tls: bool) -> None:
        """tls: whether browsers come by HTTPS."""
        self._tls = tls

    @property
    @abstractmethod
    def cookies(self) -> SessionCookies:
        """The rules of the cookies."""

    @abstractmethod
    def find_session(self, request: Request) -> LoginSession | None:
        """The session of a request; None: it has none that is good now."""

    def csrf_token(self, request: Request) -> str:
        """See `PageSessions`."""
        session = self.find_session(request)
        return "" if session is None else self.cookies.token(session)

    def check_csrf(self, request: Request, presented: str) -> None:
        """See `PageSessions`. A script presents the token in a header."""
        session = self.find_session(request)
        given = presented or request.headers.get(CSRF_HEADER, "")
        if session is None or not self.cookies.is_token(session, given):
            sentence = "the form is of an earlier session: load the page again"
            raise HTTPException(HTTPStatus.FORBIDDEN, sentence)

    def set_cookie(self, session: LoginSession) -> str:
        """The header that begins a session in a browser."""
        return self.cookies.set_cookie(session, tls=self._tls)

    def clear_cookie(self) -> str:
        """The header that ends the session there."""
        return self.cookies.clear_cookie(tls=self._tls)
