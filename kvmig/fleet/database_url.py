"""The URL of a fleet's database."""

from __future__ import annotations

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from kvmig.core.errors import ConfigError
from kvmig.core.shown_urls import shown_url

ALLOWED = "sqlite:////FILE or postgresql+psycopg://USER@HOST/DATABASE"


def parse_database_url(url: str, what: str) -> URL:
    """The URL of one of the two kinds. what: names it in the error. Raises ConfigError."""
    try:
        found = make_url(url)
    except ArgumentError as error:
        raise ConfigError(f"{what} is no URL, must be {ALLOWED}") from error
    if found.drivername not in ("sqlite", "postgresql+psycopg"):
        shown = shown_url(found.render_as_string())
        raise ConfigError(f"{what} is {shown}, must be {ALLOWED}")
    return found
