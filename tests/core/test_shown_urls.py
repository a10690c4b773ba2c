"""URLs that are printed have no secrets in them."""

from __future__ import annotations

import pytest

from kvmig.core.shown_urls import shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://u:pw@h/db", "postgresql+psycopg://u:***@h/db"),
        ("postgresql+psycopg://u:p@w@h/db", "postgresql+psycopg://u:***@h/db"),
        ("postgresql+psycopg://h/db?user=u&password=pw", "postgresql+psycopg://h/db?user=u&password=***"),
        ("http://h/x?sslPassword=a&mode=b#c", "http://h/x?sslPassword=***&mode=b#c"),
        ("http://h/x?access_token=a;api_key=b", "http://h/x?access_token=***;api_key=***"),
        ("http://h/x?sslmode=require", "http://h/x?sslmode=require"),
        ("https://hf_token@h/x", "https://***@h/x"),
        ("HTTPS://hf_token@h/x", "HTTPS://***@h/x"),
        ("postgresql://ann@h/db", "postgresql://ann@h/db"),
        ("https://h/x?Policy=p&Signature=s&Expires=9", "https://h/x?Policy=***&Signature=***&Expires=9"),
        ("https://h/cb#access_token=a&state=b", "https://h/cb#access_token=***&state=b"),
        ('{"url": "http://h/x?token=a"}', '{"url": "http://h/x?token=***"}'),
        ("can't reach http://u:pw@h/x: refused", "can't reach http://u:***@h/x: refused"),
        ("sqlite:////var/lib/kvmig.sqlite", "sqlite:////var/lib/kvmig.sqlite"),
    ],
)  # fmt: skip
def test_a_shown_url_has_no_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown
