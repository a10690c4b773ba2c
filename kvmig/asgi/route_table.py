"""The routes of engines that clients may call: for each who pays, how much, and what bounds it.

The proxy lets through what is in this table and nothing else, before a model is found or started;
the meter, the bounds of bodies, the documentation and the ledger's test are made from it. A new
engine's routes stay closed until they are named here. Pure.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

Api = Literal["openai", "responses", "messages", "cohere"]
"""Kinds of streams and errors; `openai`: chats, completions and all others."""
ModelSource = Literal["body", "form", "answer"]
"""The place where a call names its model: a JSON body's field, a form's field, or the id of an
answer that an earlier call got."""
Charge = Literal["tokens", "prompt", "nothing"]
"""What of a call the ledger counts: prompt and output tokens, the prompt's only, or nothing."""
Content = Literal["generation", "batch", "texts", "counting", "audio", "image", "none"]
"""What a body holds, which decides how large it may be: one prompt or conversation that is
answered; several conversations; texts of which each is a prompt (embeddings, scores); something
whose tokens are counted, spelt or listed; a recording; an image to change; no body."""


class ClientRoute(NamedTuple):
    """One route. path: `{id}` stands for one segment."""

    method: str
    path: str
    api: Api
    model: ModelSource
    charge: Charge
    content: Content
    works: bool = True
    """Whether an engine computes for it: such a call starts a cold model and has a ledger row."""


def _posts(
    paths: str,
    content: Content,
    charge: Charge = "tokens",
    api: Api = "openai",
    model: ModelSource = "body",
    works: bool = True,
) -> tuple[ClientRoute, ...]:
    return tuple(
        ClientRoute("POST", path, api, model, charge, content, works) for path in paths.split()
    )


CLIENT_ROUTES: tuple[ClientRoute, ...] = (
    *_posts("/v1/completions /v1/chat/completions /inference/v1/generate", "generation"),
    *_posts("/invocations /v1/systemone", "generation"),
    *_posts("/cohere/v2/chat", "generation", api="cohere"),
    *_posts("/v1/chat/completions/batch", "batch"),
    *_posts("/generative_scoring", "texts"),
    *_posts("/v1/responses", "generation", api="responses"),
    *_posts("/v1/messages", "generation", api="messages"),
    *_posts("/v1/audio/transcriptions /v1/audio/translations", "audio", model="form"),
    *_posts("/v1/audio/speech /v1/images/generations", "generation"),
    *_posts("/v1/images/edits /v1/images/variations", "image", model="form"),
    *_posts("/v1/embeddings /v2/embed /pooling /classify", "texts", "prompt"),
    *_posts("/score /v1/score /rerank /v1/rerank /v2/rerank", "texts", "prompt"),
    *_posts("/tokenize /detokenize", "counting", "nothing", works=False),
    *_posts("/v1/messages/count_tokens", "counting", "nothing", api="messages", works=False),
    ClientRoute("GET", "/v1/responses/{id}", "responses", "answer", "nothing", "none", works=False),
    ClientRoute(
        "POST", "/v1/responses/{id}/cancel", "responses", "answer", "nothing", "none", works=False
    ),
)


class RouteMatch(NamedTuple):
    """A route, and the id that the path has in it; empty: it has none."""

    route: ClientRoute
    answer_id: str = ""


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[re.Pattern[str], ClientRoute], ...]:
    return tuple(
        (re.compile(re.escape(one.path).replace(r"\{id\}", "(?P<id>[^/]+)")), one)
        for one in CLIENT_ROUTES
        if "{id}" in one.path
    )


_PLAIN = {(one.method, one.path): one for one in CLIENT_ROUTES if "{id}" not in one.path}


def find_route(method: str, path: str) -> RouteMatch | None:
    """The route of a call; None: there is none for clients. path: decoded, without a query."""
    if (plain := _PLAIN.get((method, path))) is not None:
        return RouteMatch(plain)
    for pattern, route in _patterns():
        found = pattern.fullmatch(path)
        if found is not None and route.method == method and found["id"] not in (".", ".."):
            return RouteMatch(route, found["id"])
    return None


LIVE_PATH = "/live"
"""200 from a process that answers at all, also while it stops."""
