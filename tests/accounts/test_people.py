"""Who a token speaks of, and what that person may do."""

from __future__ import annotations

from typing import Any

import pytest

from kvmig.accounts.people import LoginRefused, LoginTerms, check_terms, person_of
from kvmig.core.errors import ConfigError

ISSUER = "https://id.example.com/realms/a"
TERMS = LoginTerms(
    issuer=ISSUER, client_id="kvmig", user_groups=("staff",), admin_groups=("ops", "root")
)


@pytest.mark.parametrize(
    ("groups", "role"),
    [(["staff"], "user"), (["staff", "ops"], "admin"), (["root"], "admin"), ("staff", "user")],
)
def test_groups_give_the_role(groups: Any, role: str) -> None:
    found = person_of({"sub": "1", "preferred_username": "bea", "groups": groups}, TERMS)
    assert (found.subject, found.name, found.role) == (f"{ISSUER} 1", "bea", role)


def test_without_groups_of_users_all_people_may_log_in_as_users() -> None:
    terms = LoginTerms(issuer=ISSUER, client_id="kvmig", admin_groups=("ops",))
    assert person_of({"sub": "1"}, terms).role == "user"


@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        ({"groups": ["staff"]}, "the token has no claim sub"),
        ({"sub": "", "groups": ["staff"]}, "the token has no claim sub"),
        ({"sub": "x" * 256, "groups": ["staff"]}, "the token has no claim sub"),
        ({"sub": "1"}, "the claim groups names no group that may log in"),
        ({"sub": "1", "groups": ["other"]}, "the claim groups names no group that may log in"),
        ({"sub": "1", "groups": {"ops": 1}}, "the token's claim groups is no list of groups"),
        ({"sub": "1", "groups": [1]}, "the token's claim groups is no list of groups"),
        ({"sub": "1", "groups": ["ops"], "preferred_username": 7}, "is no name"),
        ({"sub": "1", "groups": ["ops"], "preferred_username": "..."}, "no user's name"),
    ],
)
def test_a_person_who_may_not_log_in_hears_why(claims: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoginRefused, match=sentence):
        person_of(claims, TERMS)


def test_a_provider_of_this_host_needs_no_certificate() -> None:
    for issuer in ("http://127.0.0.1:8080", "http://localhost/realms/a", "http://localhost:1/"):
        assert check_terms(LoginTerms(issuer=issuer, client_id="kvmig")).issuer == issuer


def test_a_name_becomes_a_users_name() -> None:
    claims = {"sub": "1", "groups": ["ops"], "preferred_username": "bea@example.com"}
    assert person_of(claims, TERMS).name == "bea_example.com"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"issuer": "id.example.com"}, "--oidc-issuer is 'id.example.com', must be a URL"),
        ({"issuer": "http://id.example.com"}, "--oidc-issuer is .*, must be a URL with https://"),
        ({"issuer": "http://localhost.example.com"}, "--oidc-issuer is .*, must be a URL"),
        ({"issuer": "http://127.0.0.1@id.example.com"}, "--oidc-issuer is .*, must be a URL"),
        ({"issuer": "https://id.example.com/?a=b"}, "--oidc-issuer is .*, must be a URL"),
        ({"client_id": ""}, "--oidc-client-id is '', must be"),
        ({"admin_groups": ("ops", "")}, "--oidc-admin-group is '', must be the name of a group"),
        ({"user_groups": ("",)}, "--oidc-user-group is '', must be the name of a group"),
        ({"key_hours": 0}, "--oidc-key-hours is 0, must be more than 0"),
        ({"key_hours": 1000}, "--oidc-key-hours is 1000, must be"),
    ],
)
def test_terms_that_cannot_be_used_are_refused_by_name(change: Any, sentence: str) -> None:
    given: Any = {"issuer": ISSUER, "client_id": "kvmig", **change}
    with pytest.raises(ConfigError, match=sentence):
        check_terms(LoginTerms(**given))
