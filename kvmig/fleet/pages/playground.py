"""The playground: its page, and the order to move the stream that it shows.

The chat itself is the proxy's: its script calls the API's own route, with the rights and limits of
the person's key.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvmig.fleet.pages.backend import FleetPages
from kvmig.pages.api_calls import ApiRefusal
from kvmig.pages.words import move_text


def playground_routes(pages: FleetPages) -> list[Route]:
    """The routes."""

    async def show(request: Request) -> Response:
        pages.site.find_person(request)
        return pages.site.page(request, "playground", {"title": "Playground"})

    async def move(request: Request) -> Response:
        """Move a stream to the instance with the most room; the answer is for the script."""
        form = await pages.site.read_form(request)
        body = {name: str(form.get(name, "")) for name in ("model", "request_id")}
        try:
            found = (await pages.call(request, "POST", "/live/move", body=body))["move"]
        except ApiRefusal as error:
            return JSONResponse({"sentence": str(error)}, error.status)
        return JSONResponse({"sentence": move_text(found)})

    return [
        Route("/playground", show),
        Route("/playground/move", move, methods=["POST"]),
    ]
