"""People who look at the page, without a log-in."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvmig.pages.session import PagePerson

TOKEN = "the-token"


class FixedPerson:
    """Sessions of which each is the same person's."""

    def __init__(self, person: PagePerson | None) -> None:
        self.person = person

    def find_person(self, request: Request) -> PagePerson | None:
        return self.person

    def csrf_token(self, request: Request) -> str:
        return TOKEN

    def check_csrf(self, request: Request, presented: str) -> None:
        if presented != TOKEN:
            raise HTTPException(HTTPStatus.FORBIDDEN, "the form's token is not this session's")
