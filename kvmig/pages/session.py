"""The person who looks at a page, and the token that its forms carry."""

from __future__ import annotations

from typing import Protocol

import msgspec
from starlette.requests import Request


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
