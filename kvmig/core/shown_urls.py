"""URLs as logs, errors and reports may show them: without what is secret in them. Pure."""

from __future__ import annotations

import re

HIDDEN = "***"
"""Stands for what is not shown."""
_USER = re.compile(r"(?<=://)(?P<user>[^/?#\s:@]*):[^/?#\s]*(?=@)")
_FIELD = re.compile(
    r"(?P<name>[?&;][^=&;#\s]*(?:pass|pwd|secret|token|key|credential|sig)[^=&;#\s]*=)[^&;#\s]*",
    re.IGNORECASE,
)


def shown_url(url: str) -> str:
    """A URL, or a text that has URLs in it, without passwords: neither that of the user before the
    host, nor those of fields of the query. Other fields stay."""
    return _FIELD.sub(rf"\g<name>{HIDDEN}", _USER.sub(rf"\g<user>:{HIDDEN}", url))
