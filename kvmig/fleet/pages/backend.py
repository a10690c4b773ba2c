"""What the fleet's pages work on: the API as the person who is logged in may call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from kvmig.accounts.keys import BAD_KEY, KeyIndex
from kvmig.fleet.callers import FORWARDED, GRANT
from kvmig.pages.api_calls import ApiCaller, ApiRefusal, Query
from kvmig.pages.site import PageSite


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
        person = self.site.find_person(request)
        grant = self._keys().of_prefix(person.key)
        if grant is None:  # revoked since
            raise ApiRefusal(BAD_KEY.status, BAD_KEY.message)
        return await self._api.call(
            method,
            path,
            body=body,
            query=query,
            scope={GRANT: grant},
            headers={FORWARDED: request.headers.get(FORWARDED, "")},
        )
