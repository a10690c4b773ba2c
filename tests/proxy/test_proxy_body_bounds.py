"""Bodies at a fleet's door: no larger than what the model that they name can use of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvmig.asgi.body_bounds import ModelReach, widest
from kvmig.proxy.directory import ModelDirectory
from kvmig.proxy.messages import FleetSnapshot, ModelCard, ModelRoute
from tests.support.proxy_site import PEPPER, Site, key

SMALL, LARGE = ModelReach(600), ModelReach(131_072)
MIDDLE_BYTES = 2_000_000
"""Of use to LARGE, and not to SMALL."""


def told(name: str, reach: ModelReach | None, **more: Any) -> ModelRoute:
    return ModelRoute(name=name, state="cold", card=ModelCard(reach=reach), **more)


def body(model: str = "small") -> bytes:
    return msgspec.json.encode({"model": model, "prompt": "x" * MIDDLE_BYTES})


async def refused_at_its_head(door: Site, path: str, size: int = MIDDLE_BYTES) -> bytes:
    """What is answered before a byte of the body is sent."""
    reader, writer = await door.connect()
    head = f"POST {path} HTTP/1.1\r\nhost: door\r\nauthorization: Bearer {door.key}\r\n"
    head += f"content-length: {size}\r\nexpect: 100-continue\r\n\r\n"
    writer.write(head.encode())
    line = await reader.readline()
    writer.close()
    return line


async def test_a_body_that_no_model_of_the_key_can_use_is_refused_at_its_head(door: Site) -> None:
    door.tell(told("small", SMALL))
    assert b" 413 " in await refused_at_its_head(door, "/v1/completions")
    door.tell(told("large", LARGE))
    assert b" 100 " in await refused_at_its_head(door, "/v1/completions")


async def test_a_path_that_names_a_model_bounds_the_body_by_that_model(door: Site) -> None:
    door.tell(told("small", SMALL, adapters=("poet",)), told("large", LARGE))
    for name in ("small", "poet", "small:poet"):
        line = await refused_at_its_head(door, f"/models/{name}/v1/completions")
        assert b" 413 " in line
    assert b" 100 " in await refused_at_its_head(door, "/models/large/v1/completions")


async def test_a_body_that_its_model_cannot_use_starts_no_model(door: Site) -> None:
    door.tell(told("small", SMALL), told("unknown", None))
    answer = await door.ask(body(), "/v1/completions")
    deep = b'{"model": "small", "x": ' + b"[" * 100 + b"]" * 100 + b"}"
    nested = await door.ask(deep, "/v1/completions")
    assert (answer.status_code, nested.status_code) == (413, 413)
    assert "more is of no use to the model" in answer.json()["error"]["message"]
    assert "nested too deeply" in nested.json()["error"]["message"]
    assert door.wanted == []


async def test_a_body_that_its_model_can_use_goes_on(door: Site) -> None:
    async with door.deployment(card=ModelCard(reach=LARGE)):
        door.tell(told("small", SMALL))
        answer = await door.ask(body("count"), "/v1/completions")
    assert answer.status_code == 200


async def test_an_order_to_the_server_is_a_small_one(door: Site) -> None:
    line = await refused_at_its_head(door, "/kvmig/v2/models")
    assert b" 413 " in line


@pytest.mark.parametrize(
    ("models", "expected"),
    [(None, None), (("small",), SMALL), (("both",), LARGE), (("gone",), None)],
)
def test_a_key_has_the_reach_of_the_models_that_it_may_use(
    models: tuple[str, ...] | None, expected: ModelReach | None
) -> None:
    directory = ModelDirectory()
    routes = (told("small", SMALL), told("large", LARGE), told("unknown", None))
    directory.apply(
        FleetSnapshot(
            version=1, pepper=PEPPER, routes=routes, aliases={"both": {"small": 1, "large": 1}}
        )
    )
    assert directory.reach(key(models=models)[1], None) == expected


def test_several_models_have_the_widest_reach_of_all() -> None:
    assert widest([ModelReach(10, 4, media=True), ModelReach(5, 64)]) == ModelReach(10, 64, True)
    assert widest([ModelReach(10), None]) is None
    assert widest([]) is None
