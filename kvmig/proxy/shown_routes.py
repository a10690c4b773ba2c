"""What clients are shown of a route: a model's row in the list, and how its start goes. Pure."""

from __future__ import annotations

from typing import Any

from kvmig.proxy.activator import PendingRequest, left_s
from kvmig.proxy.messages import ModelRoute


def shown_row(name: str, route: ModelRoute) -> dict[str, Any]:
    """The model's row of OpenAI's list, with its deployment's card, and kvmig's own fields."""
    row: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": route.card.created,
        "owned_by": route.card.owned_by,
    }
    if route.card.max_model_len is not None:
        row["max_model_len"] = route.card.max_model_len
    if name in route.adapters:
        row["parent"] = route.name
    return {**row, "kvmig": {"state": route.state, "start_s": route.start_s}}


def shown_start(route: ModelRoute, waiter: PendingRequest, now: float) -> str:
    """How the start goes that a call waits for."""
    if route.why:
        return f"{route.state}: {route.why}"
    left = left_s(route, waiter, now)
    waited = f"starting, {now - waiter.since:.0f} s so far"
    return waited if left is None else f"{waited}, some {left} s left"
