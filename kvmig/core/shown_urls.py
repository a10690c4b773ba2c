"""URLs as logs, errors and reports may show them: without what is secret in them. Pure."""

from __future__ import annotations

import re

HIDDEN = "***"
"""Stands for what is not shown."""
_USER = re.compile(r"(?<=://)(?P<user>[^/?#\s:@]*):[^/?#\s]*(?=@)")
_WEB_USER = re.compile(r"(?<=http://|ttps://)[^/?#\s:@]+(?=@)", re.IGNORECASE)
"""A user without a password, which web servers take for a token."""
_FIELD = re.compile(
    r"(?P<name>[?&;#][^=&;#\s]*"
    r"(?:pass|pwd|secret|token|key|credential|sig|auth|jwt|policy|session)[^=&;#\s]*=)"
    r"[^&;#\s\"'<>]*",
    re.IGNORECASE,
)


def shown_url(url: str) -> str:
    """A URL, or a text that has URLs in it, without passwords and tokens: neither those of the user
    before the host, nor those of fields of the query and the fragment. Other fields stay."""
    hidden = _WEB_USER.sub(HIDDEN, _USER.sub(rf"\g<user>:{HIDDEN}", url))
    return _FIELD.sub(rf"\g<name>{HIDDEN}", hidden)
