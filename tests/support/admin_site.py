"""The admin API over a router on llumlets without engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from kvmig.asgi.access import access
from kvmig.asgi.session_id import session_key
from kvmig.core.api_records import InstanceRow
from kvmig.core.order_fence import OrderToken
from kvmig.frontend.admin import admin_api
from kvmig.frontend.inventory import cluster_rows
from kvmig.frontend.struct_answers import add_schemas
from tests.support.fake_llumlet import Cluster

MODEL = "the model"


async def raise_fence(token: OrderToken) -> None:
    """In place of the launcher, which no fleet's server has asked before."""


def name_session(session: str, account: str) -> int | None:
    return session_key(b"a secret", account, session)


@asynccontextmanager
async def admin_client(it: Cluster, *keys: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the router's admin API, which asks for one of the keys."""

    def rows() -> list[InstanceRow]:
        return cluster_rows(it.router.fleet.rows(), [], MODEL)

    app = FastAPI()
    add_schemas(app)
    rule = access(keys, "", "127.0.0.1").admin
    app.include_router(
        admin_api(it.router, rows, MODEL, rule, raise_fence, name_session=name_session)
    )
    transport = httpx.ASGITransport(app=app)
    url = "http://localhost/kvmig/v1"
    async with httpx.AsyncClient(transport=transport, base_url=url) as client:
        yield client


def problem(answer: httpx.Response) -> tuple[int, dict[str, Any]]:
    """Status and error, whose shape is checked."""
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["code"] == answer.status_code
    return answer.status_code, body["error"]
