"""Keys of the API: made, shown once, checked. Pure; the server and the proxies share these rules.

A key is `kv-PREFIX-SECRET`. The prefix names the key in lists, logs and audit rows. The secret is
256 random bits, and is kept only as a hash under the *pepper*, a secret of the fleet's: who reads
the database alone can neither use nor test a key. Random bits can't be guessed, so the hash is a
quick one.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from http import HTTPStatus
from typing import Literal, NamedTuple, get_args

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.core.priorities import CLASS_NAME

Scope = Literal["infer", "read", "admin"]
"""infer: requests to models. read: keys and usage of the key's own user. admin: the fleet's API."""
SCOPES: tuple[str, ...] = get_args(Scope)
Period = Literal["day", "month", "total"]
"""Periods by the calendar, in UTC; total: the key's life."""
PERIODS: tuple[str, ...] = get_args(Period)
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
PREFIX_LENGTH = 8
SECRET_BYTES = 32
PEPPER_BYTES = 32
FORM = re.compile(r"kv-([0-9a-z]{8})-([A-Za-z0-9_-]{43})")
MODEL_LENGTH = 260
"""Room for two names and a colon, at least."""
CLASS_LENGTH = 64
MOST = 10**12
"""Most requests and tokens per minute."""
NO_MODEL = "model_not_found"
"""OpenAI's code."""
QUOTA_CODE = "insufficient_quota"
"""OpenAI's word, as the code of an error and as its type."""
RESERVED_CODE = "rate_limit_exceeded"
RESERVED_WORDS = "reserved by calls that run"
QUOTA_WORDS = "'s quota of "
"""Words in the error message, by which a proxy recognises that of a deployment."""
THE_KEY = "the API key"


class ModelQuota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of one model in a period, prompt and output."""

    tokens: int
    period: Period = "month"


class AccountLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a key may do, or all keys of a user together."""

    rpm: int | None = None
    """Requests per minute; None: no limit."""
    tpm: int | None = None
    """Tokens per minute, prompt and output."""
    parallel: int | None = None
    """Requests at once."""
    quota: int | None = None
    """Tokens in a period, prompt and output; not one more is given out."""
    period: Period = "month"
    """Period of the quota."""
    quotas: Mapping[str, ModelQuota] = {}
    """More of them, each of one model of the catalogue, by its name."""


class KeyTerms(AccountLimits, frozen=True, kw_only=True):
    """What a key allows."""

    scopes: tuple[Scope, ...] = ("infer", "read")
    models: tuple[str, ...] | None = None
    """Names that requests may give; None: all."""
    cidrs: tuple[str, ...] | None = None
    """Networks that requests may come from; None: all."""
    classes: tuple[str, ...] | None = None
    """Priority classes that requests may name; None: all."""
    expires: float | None = None
    """Unix time."""


class KeyGrant(KeyTerms, frozen=True, kw_only=True):
    """What who lets requests in must know of a key. It can't be turned back into the key."""

    key_id: str
    origin: str
    """Id of the first of the keys that were rotated into this one; limits are of all together."""
    user_id: str
    user: str
    """The user's name."""
    user_limits: AccountLimits = AccountLimits()
    """Limits of all keys of the user together."""
    prefix: str
    hash: bytes


class LimitedAccount(NamedTuple):
    """A key or a user whose limits hold for a request."""

    id: str
    name: str
    """Name in error messages."""
    limits: AccountLimits


def limited_by(grant: KeyGrant) -> tuple[LimitedAccount, LimitedAccount]:
    """The key with those that it was rotated from, and its user with all keys."""
    return (
        LimitedAccount(grant.origin, THE_KEY, grant),
        LimitedAccount(grant.user_id, f"the user {grant.user}", grant.user_limits),
    )


class AppliedQuota(NamedTuple):
    """One that holds for a request."""

    id: str
    whose: LimitedAccount
    tokens: int
    period: Period
    model: str = ""
    """Model whose tokens count; empty: all models."""


def quotas_of(grant: KeyGrant, model: str | None = None) -> list[AppliedQuota]:
    """The quotas that hold for requests to a model of the catalogue; None: all quotas."""
    found = []
    for one in limited_by(grant):
        limits = one.limits
        if limits.quota is not None:
            found.append(AppliedQuota(one.id, one, limits.quota, limits.period))
        found += [
            AppliedQuota(f"{one.id} {name}", one, quota.tokens, quota.period, name)
            for name, quota in limits.quotas.items()
            if model is None or name == model
        ]
    return found


class NewKey(NamedTuple):
    """A key as its user sees it, once, and what is kept of it."""

    shown: str
    prefix: str
    hash: bytes


class KeyDenied(NamedTuple):
    """The answer to a request that its key doesn't allow. code: OpenAI's word for it."""

    status: HTTPStatus
    message: str
    code: str


BAD_KEY = KeyDenied(HTTPStatus.UNAUTHORIZED, "no such API key", "invalid_api_key")
EXPIRED = KeyDenied(HTTPStatus.UNAUTHORIZED, "the API key has expired", "expired_api_key")
EXPIRED_S = 86400.0
"""Time for which an expired key is called so; then it is as one that was never there."""


def new_key(pepper: bytes) -> NewKey:
    """Make one."""
    prefix = "".join(secrets.choice(ALPHABET) for _ in range(PREFIX_LENGTH))
    secret = secrets.token_urlsafe(SECRET_BYTES)
    return NewKey(f"kv-{prefix}-{secret}", prefix, hashed(pepper, secret))


def hashed(pepper: bytes, secret: str) -> bytes:
    """What is kept of a key's secret."""
    return blake2b(secret.encode(), key=pepper, digest_size=32).digest()


def parse_key(presented: str) -> tuple[str, str] | None:
    """Prefix and secret; None for what can't be a key."""
    found = FORM.fullmatch(presented)
    return None if found is None else (found[1], found[2])


class KeyIndex:
    """The keys that let requests in, by their prefixes."""

    def __init__(self, pepper: bytes, grants: Iterable[KeyGrant] = ()) -> None:
        self._pepper = pepper
        self._grants: dict[str, KeyGrant] = {}
        self.update(grants)

    def __len__(self) -> int:
        return len(self._grants)

    def update(self, grants: Iterable[KeyGrant], revoked: Iterable[str] = ()) -> None:
        """Add or replace some; forget the keys with the prefixes `revoked`."""
        self._grants.update((grant.prefix, grant) for grant in grants)
        for prefix in revoked:
            self._grants.pop(prefix, None)

    def of_prefix(self, prefix: str) -> KeyGrant | None:
        """The grant of a key that lists name so; None if it lets nothing in."""
        return self._grants.get(prefix)

    def find(self, presented: str) -> KeyGrant | None:
        """The grant of a key; None if there is no such key.

        How long that takes says nothing of a secret: the whole of it is hashed, and the hashes are
        compared in constant time.
        """
        parts = parse_key(presented)
        if parts is None:
            return None
        prefix, secret = parts
        grant = self._grants.get(prefix)
        kept = bytes(32) if grant is None else grant.hash
        return grant if hmac.compare_digest(hashed(self._pepper, secret), kept) else None


def allows(
    grant: KeyGrant, model: str | None, address: str, now: float, scope: Scope | None = "infer"
) -> KeyDenied | None:
    """The reason why the key is no good for a request to `model`, sent from `address` at `now`;
    None if it is good.

    model: None for a request to none. A model that the key may not use is as one that isn't there.
    scope: None: it is checked elsewhere.
    """
    if grant.expires is not None and now >= grant.expires:
        return EXPIRED
    if grant.cidrs is not None and not _within(address, grant.cidrs):
        message = "the API key isn't for requests from this network"
        return KeyDenied(HTTPStatus.FORBIDDEN, message, "network_not_allowed")
    if scope is not None and scope not in grant.scopes:
        message = f"the API key has no scope {scope!r}, it has {', '.join(grant.scopes)}"
        return KeyDenied(HTTPStatus.FORBIDDEN, message, "insufficient_scope")
    if model is not None and grant.models is not None and model not in grant.models:
        return no_model(model)
    return None


def is_forgotten(grant: KeyGrant, now: float) -> bool:
    """Whether a key expired EXPIRED_S ago, or earlier."""
    return grant.expires is not None and now >= grant.expires + EXPIRED_S


def remembered(grants: Iterable[KeyGrant], now: float) -> list[KeyGrant]:
    """The grants of keys that are not forgotten."""
    return [one for one in grants if not is_forgotten(one, now)]


def quota_used_up(quota: AppliedQuota, anew: float | None) -> KeyDenied:
    """The answer to a request where nothing is left of a quota."""
    message = f"{_named(quota)} is used up{_again(anew)}"
    return KeyDenied(HTTPStatus.TOO_MANY_REQUESTS, message, QUOTA_CODE)


def quota_too_small(quota: AppliedQuota, left: int, needed: int, anew: float | None) -> KeyDenied:
    """The same where less is left than a request needs to begin."""
    message = f"{_named(quota)} has {left} left, the request needs {needed} to begin{_again(anew)}"
    return KeyDenied(HTTPStatus.TOO_MANY_REQUESTS, message, QUOTA_CODE)


def quota_reserved(quota: AppliedQuota, left: int) -> KeyDenied:
    """The same where others hold what is left, and may give it back."""
    message = f"{left} tokens are left of {_named(quota)}, {RESERVED_WORDS}: try again"
    return KeyDenied(HTTPStatus.TOO_MANY_REQUESTS, message, RESERVED_CODE)


def quota_code(sentence: str) -> str:
    """The code of a deployment's message about a quota; empty: it is about something else."""
    if RESERVED_WORDS in sentence:
        return RESERVED_CODE
    return QUOTA_CODE if QUOTA_WORDS in sentence else ""


def _named(quota: AppliedQuota) -> str:
    period = "in all" if quota.period == "total" else f"a {quota.period}"
    of_model = f" for model {quota.model}" if quota.model else ""
    return f"{quota.whose.name}{QUOTA_WORDS}{quota.tokens} tokens {period}{of_model}"


def _again(at: float | None) -> str:
    return "" if at is None else f"; it starts again at {datetime.fromtimestamp(at, UTC):%FT%TZ}"


def no_model(model: str) -> KeyDenied:
    """The answer to a request to a model that isn't there, or isn't for the key."""
    return KeyDenied(HTTPStatus.NOT_FOUND, f"no model {model[:150]!r}", NO_MODEL)


@lru_cache(maxsize=4096)
def _network(cidr: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(cidr)


def _within(address: str, cidrs: Iterable[str]) -> bool:
    """Whether one of the networks has the address; an IPv4 client of an IPv6 socket is IPv4's."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in _network(cidr) for cidr in cidrs)


def check_terms(terms: KeyTerms, now: float) -> None:
    """Raises ConfigError with the field, its value and what is allowed."""
    unknown = set(terms.scopes) - set(SCOPES)
    if not terms.scopes or unknown:
        raise ConfigError(f"scopes is {list(terms.scopes)}, must be some of {', '.join(SCOPES)}")
    if terms.models is not None and not terms.models:
        raise ConfigError("models is empty, must name models; leave it out for all")
    for name in terms.models or ():
        if not (0 < len(name) <= MODEL_LENGTH and name.isprintable()):
            raise ConfigError(
                f"models has {name!r:.100}, must be names of 1 to {MODEL_LENGTH} printable"
                " characters"
            )
    if terms.classes is not None and not terms.classes:
        raise ConfigError("classes is empty, must name priority classes; leave it out for all")
    for name in terms.classes or ():
        if len(name) > CLASS_LENGTH or not CLASS_NAME.fullmatch(name):
            raise ConfigError(
                f"classes has {name!r:.100}, must be names of priority classes: a letter, then"
                f" letters, digits, - or _, at most {CLASS_LENGTH}"
            )
    if terms.cidrs is not None and not terms.cidrs:
        raise ConfigError("cidrs is empty, must name networks; leave it out for all")
    for cidr in terms.cidrs or ():
        try:
            ipaddress.ip_network(cidr)
        except ValueError as error:
            raise ConfigError(
                f"cidrs has {cidr!r:.100}, must be networks as 10.0.0.0/8 or fd00::/8 ({error})"
            ) from error
    if terms.expires is not None and not now < terms.expires < now + MOST:
        raise ConfigError(f"expires is {terms.expires:.0f}, must be a Unix time to come")
    check_limits(terms)


def check_limits(limits: AccountLimits) -> None:
    """Raises ConfigError with the field, its value and what is allowed."""
    if limits.period not in PERIODS:
        raise ConfigError(f"period is {limits.period!r:.100}, must be one of {', '.join(PERIODS)}")
    for field in ("rpm", "tpm", "parallel", "quota"):
        value = getattr(limits, field)
        if value is not None and not 1 <= value <= MOST:
            raise ConfigError(f"{field} is {value}, must be 1 to {MOST}; leave it out for no limit")
    for model, quota in limits.quotas.items():
        if not 1 <= quota.tokens <= MOST:
            raise ConfigError(f"quotas: {model!r:.150} is {quota.tokens}, must be 1 to {MOST}")
