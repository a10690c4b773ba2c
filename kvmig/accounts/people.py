"""People who log in by an identity provider (OpenID Connect): who they are here, by what their
token says. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from kvmig.core.errors import ConfigError, KvmigError

MOST_SUBJECT = 255
"""Characters of a subject, by OpenID Connect Core 1.0, section 2."""
ISSUER = re.compile(r"https://[^/?#\s]+[^?#\s]*|http://(127\.0\.0\.1|localhost)(:\d+)?(/[^?#\s]*)?")
UNFIT = re.compile(r"[^A-Za-z0-9._-]")
"""What a user's name doesn't have."""


class LoginRefused(KvmigError):
    """A person may not log in, or not by this token."""


class LoginTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Which identity provider vouches for people, and what they may do."""

    issuer: str
    """The provider's URL."""
    client_id: str
    """What the fleet is called there."""
    groups_claim: str = "groups"
    """Claim of a token with a person's groups."""
    name_claim: str = "preferred_username"
    """Claim with a person's name; without it, the subject is the name."""
    user_groups: tuple[str, ...] = ()
    """Groups whose people may log in; none: all people."""
    admin_groups: tuple[str, ...] = ()
    """Groups whose people are admins."""
    key_hours: float = 12.0
    """How long a key is good that a person gets."""


class LoggedIn(NamedTuple):
    """A person who may log in."""

    subject: str
    """The person's lasting id, with the issuer."""
    name: str
    """Name of the user."""
    role: Literal["admin", "user"]


def check_terms(terms: LoginTerms) -> LoginTerms:
    """Returns the terms unchanged. Raises ConfigError."""
    if not ISSUER.fullmatch(terms.issuer):
        raise ConfigError(
            f"--oidc-issuer is {terms.issuer!r:.200}, must be a URL with https:// and without a"
            " query (http:// on this host only)"
        )
    if not terms.client_id or not terms.client_id.isprintable():
        raise ConfigError(
            f"--oidc-client-id is {terms.client_id!r:.200}, must be the fleet's id at the identity"
            " provider"
        )
    for flag, groups in (("admin", terms.admin_groups), ("user", terms.user_groups)):
        if not all(groups):
            raise ConfigError(f"--oidc-{flag}-group is '', must be the name of a group")
    if not 0 < terms.key_hours <= 24 * 31:
        raise ConfigError(
            f"--oidc-key-hours is {terms.key_hours:g}, must be more than 0, up to 744"
        )
    return terms


def person_of(claims: Mapping[str, Any], terms: LoginTerms) -> LoggedIn:
    """The person of whom an issuer's token speaks. Raises LoginRefused."""
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= MOST_SUBJECT:
        raise LoginRefused("the token has no claim sub")
    groups = _groups(claims.get(terms.groups_claim, []), terms.groups_claim)
    admin = bool(groups & set(terms.admin_groups))
    if not admin and terms.user_groups and not groups & set(terms.user_groups):
        raise LoginRefused(
            f"the claim {terms.groups_claim} names no group that may log in to this fleet"
        )
    called = claims.get(terms.name_claim, subject)
    if not isinstance(called, str) or not called:
        raise LoginRefused(f"the token's claim {terms.name_claim} is no name")
    name = UNFIT.sub("_", called)[:100].lstrip("._-")
    if not name or ".." in name:
        raise LoginRefused(
            f"the token's claim {terms.name_claim} is {called!r:.100}, no user's name"
        )
    return LoggedIn(f"{terms.issuer} {subject}", name, "admin" if admin else "user")


def _groups(found: Any, claim: str) -> set[str]:
    """Raises LoginRefused."""
    if isinstance(found, str):
        return {found}
    if isinstance(found, Sequence) and all(isinstance(one, str) for one in found):
        return set(found)
    raise LoginRefused(f"the token's claim {claim} is no list of groups")
