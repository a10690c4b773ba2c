"""Salts of users' prompts, and entries that are each user's own."""

from __future__ import annotations

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvmig.asgi.call import HttpCall
from kvmig.core.config import ClusterConfig, HttpConfig, check
from kvmig.core.errors import ConfigError
from kvmig.engines.transformers.kind import TransformersKind, engine_fields, parse
from kvmig.engines.vllm.kind import VllmKind
from kvmig.frontend.isolation import OwnEntries, PromptSalts, current_tenant, make_salt
from kvmig.models import BUNDLED
from tests.support.http_calls import in_call
from tests.support.http_states import behind_middleware

SECRET = b"s" * 32
PROMPTS = st.tuples(st.text(max_size=20), st.none() | st.text(max_size=20))
"""A user, and the call's own salt."""


@hypothesis.given(PROMPTS, PROMPTS)
def test_two_prompts_have_one_salt_only_if_user_and_given_salt_are_the_same(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    assert (make_salt(SECRET, *one) == make_salt(SECRET, *other)) == (one == other)


def test_nobody_computes_a_users_salt_without_the_clusters_secret() -> None:
    assert make_salt(SECRET, "anna", None) != make_salt(b"t" * 32, "anna", None)
    assert "anna" not in make_salt(SECRET, "anna", "anna")


def test_all_front_ends_of_a_cluster_make_the_same_salts() -> None:
    with in_call(HttpCall(tenant="anna")):
        assert PromptSalts(SECRET).salt_of("x") == PromptSalts(SECRET).salt_of("x")
        assert PromptSalts(SECRET).salt_of("x") == make_salt(SECRET, "anna", "x")


def test_an_entry_is_found_by_calls_of_its_own_user_only() -> None:
    entries = OwnEntries[int]()
    with in_call(HttpCall(tenant="anna")):
        entries["r"] = 1
    with in_call(HttpCall(tenant="bea")):
        assert entries.get("r") is None
        assert list(entries) == []
        assert entries.pop("r", None) is None
        entries["r"] = 2
    with in_call(HttpCall(tenant="anna")):
        assert dict(entries) == {"r": 1}
        del entries["r"]
        assert len(entries) == 0


@pytest.mark.parametrize(("uds", "believed"), [("/run/s", "anna"), ("", "")])
async def test_who_says_whose_call_it_is_is_believed_on_a_unix_socket_only(
    uds: str, believed: str
) -> None:
    async def tell(request: Request) -> PlainTextResponse:
        return PlainTextResponse(current_tenant())

    app = Starlette(routes=[Route("/", tell)])
    behind_middleware(app, HttpConfig(uds=uds))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.get("/", headers={"x-kvmig-tenant": "anna"})
    assert answer.text == believed


def test_users_cannot_be_isolated_on_a_port() -> None:
    with pytest.raises(ConfigError, match="--isolate-users is given, must be left out without --"):
        check(ClusterConfig(http=HttpConfig(isolate_users=True)))


@pytest.mark.engine
@pytest.mark.parametrize(
    "words",
    [
        ['--speculative-config={"method": "suffix"}'],
        ["--speculative-config", '{"method": "suffix", "suffix_decoding_max_cached_requests": 9}'],
        ["--speculative-config.method", "suffix"],
    ],
)
def test_drafts_made_of_other_users_answers_are_refused_where_users_are_isolated(
    words: list[str],
) -> None:
    config = ClusterConfig(http=HttpConfig(isolate_users=True, uds="/run/s"))
    with pytest.raises(ConfigError, match="must have suffix_decoding_max_cached_requests 0, too"):
        VllmKind().flags_for([str(BUNDLED), *words], config)
    assert VllmKind().flags_for([str(BUNDLED), *words], ClusterConfig()) == []
    own = '{"method": "suffix", "suffix_decoding_max_cached_requests": 0}'
    assert VllmKind().flags_for([str(BUNDLED), f"--speculative-config={own}"], config) == []


@pytest.mark.parametrize("isolated", [True, False])
def test_the_transformers_engine_shares_no_prefix_where_users_are_isolated(isolated: bool) -> None:
    config = ClusterConfig(http=HttpConfig(isolate_users=isolated, uds="/run/s"))
    args = parse([str(BUNDLED), *TransformersKind().flags_for([], config)])
    assert engine_fields(args)["share_prefixes"] == (not isolated)
