"""The table of routes that clients may call."""

from __future__ import annotations

import pytest

from kvmig.asgi.route_table import CLIENT_ROUTES, ClientRoute, find_route


@pytest.mark.parametrize("route", CLIENT_ROUTES, ids=lambda one: f"{one.method} {one.path}")
def test_each_route_is_found_by_its_own_method_and_path(route: ClientRoute) -> None:
    found = find_route(route.method, route.path.replace("{id}", "resp_1"))
    assert found is not None
    assert found.route is route
    assert found.answer_id == ("resp_1" if "{id}" in route.path else "")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/nothing"),
        ("GET", "/v1/completions"),
        ("POST", "/v1/completions/"),
        ("POST", "/v1//completions"),
        ("POST", "/inference/v1/abort_requests"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/completions/render"),
        ("GET", "/v1/responses/a/b"),
        ("GET", "/v1/responses/.."),
        ("POST", "/v1/responses/../cancel"),
    ],
)
def test_what_is_not_in_the_table_is_not_found(method: str, path: str) -> None:
    assert find_route(method, path) is None


def test_only_posts_make_an_engine_work() -> None:
    assert all(one.method == "POST" for one in CLIENT_ROUTES if one.works)
    assert not any(one.works for one in CLIENT_ROUTES if one.path == "/tokenize")
