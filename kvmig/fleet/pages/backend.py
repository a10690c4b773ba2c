"""What the fleet's pages work on: the API as the person who is logged in may call it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvmig.accounts.keys import BAD_KEY, KeyGrant, KeyIndex
from kvmig.fleet.callers import FORWARDED, GRANT, who_calls
from kvmig.pages.api_calls import ApiCaller, ApiRefusal, Query
from kvmig.pages.site import NotLoggedIn, PageSite


class FleetPages:
    """The page's site, and calls of the API for its person."""

    def __init__(self, site: PageSite, api: ApiCaller, keys: Callable[[], KeyIndex]) -> None:
        """keys: those that let calls in now."""
        self.site = site
        self._api = api
        self._keys = keys

    async def call(
        self,
        request: Request,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Query | None = None,
    ) -> Any:
        """What the API answers to the person of a page's request. Raises NotLoggedIn,
        ApiRefusal."""
        grant = self._grant(request)
        return await self._api.call(
            method,
            path,
            body=body,
            query=query,
            scope={GRANT: grant},
            headers={FORWARDED: request.headers.get(FORWARDED, "")},
        )

    def check_admin(self, request: Request) -> None:
        """Raises NotLoggedIn, ApiRefusal, HTTPException unless the person may do everything."""
        scope = {**request.scope, GRANT: self._grant(request)}
        who_calls(Request(scope), self._keys(), time.time())

    def is_admin(self, request: Request) -> bool:
        """Whether the person may still do everything."""
        try:
            self.check_admin(request)
        except (NotLoggedIn, ApiRefusal, HTTPException):
            return False
        return True

    def _grant(self, request: Request) -> KeyGrant:
        """The grant of the person's key. Raises NotLoggedIn, ApiRefusal."""
        grant = self._keys().of_prefix(self.site.find_person(request).key)
        if grant is None:  # revoked since
            raise ApiRefusal(BAD_KEY.status, BAD_KEY.message)
        return grant
