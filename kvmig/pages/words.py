"""Values as pages show them, and what forms mean. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from kvmig.core.quantities import size_text

WHOLE = re.compile(r"-?\d{1,18}")
DECIMAL = re.compile(r"-?\d{1,18}\.\d{1,9}")
TONES = {
    "serving": "good",
    "ready": "good",
    "running": "good",
    "done": "good",
    "committed": "good",
    "failed": "bad",
    "hung": "bad",
    "lost": "bad",
    "silent": "bad",
    "stopped": "bad",
    "aborted": "bad",
    "zero": "idle",
    "off": "idle",
    "parked": "idle",
}
"""The tones of states; every other state is one that passes."""


def tone_of(state: str) -> str:
    """How a state is coloured: good, bad, idle or wait."""
    return TONES.get(state, "wait")


def time_text(at: float | None) -> str:
    """A Unix time in UTC; empty: there is none."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def count_text(count: float) -> str:
    """A number with its thousands apart."""
    return f"{count:,.0f}"


def percent_of(part: float, whole: float) -> float:
    """A part of a whole in percent, 0 to 100; of nothing it is 0."""
    return 0.0 if whole <= 0 else round(min(max(100.0 * part / whole, 0.0), 100.0), 1)


def typed_number(text: str) -> int | float | str | None:
    """What a form's field means where a number is wanted; empty: null. Text that is no number stays
    as it is, for the API to refuse."""
    text = text.strip()
    if not text:
        return None
    if WHOLE.fullmatch(text):
        return int(text)
    return float(text) if DECIMAL.fullmatch(text) else text


def typed_json(text: str) -> object:
    """What a hidden field of a form holds; empty: null. Text that is no JSON stays as it is, for
    the API to refuse."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return text


def typed_list(text: str) -> list[str]:
    """The words of a form's field, apart by spaces or commas."""
    return text.replace(",", " ").split()


def limits_text(terms: Mapping[str, object]) -> list[str]:
    """The limits that are set, one text each."""
    named = [f"{name} {terms[name]}" for name in ("rpm", "tpm", "parallel") if terms[name]]
    if terms["quota"]:
        named.append(f"quota {terms['quota']} per {terms['period']}")
    quotas = terms["quotas"]
    assert isinstance(quotas, Mapping)
    named += [
        f"quota of {model} {one['tokens']} per {one['period']}" for model, one in quotas.items()
    ]
    return named


def move_text(found: Mapping[str, object]) -> str:
    """What a migration's report says, in words."""
    if found["state"] != "committed":
        return f"The stream did not move: {found['reason'] or found['state']}"
    return f"The stream moved from {found['source']} to {found['destination']}"


LIMITS = ("rpm", "tpm", "parallel", "quota", "period", "quotas")
"""Limits of a key or a user."""


def limits_json(terms: Mapping[str, object]) -> str:
    """The limits among terms, for the API to compare."""
    return json.dumps({name: terms[name] for name in LIMITS})


def quotas_text(quotas: Mapping[str, Mapping[str, object]]) -> str:
    """Quotas of single models, as a form has them."""
    return " ".join(f"{name}={one['tokens']}/{one['period']}" for name, one in quotas.items())


FILTERS = {
    "size": size_text,
    "tone": tone_of,
    "time": time_text,
    "count": count_text,
    "limits": limits_text,
    "limits_json": limits_json,
    "json": json.dumps,
    "quotas": quotas_text,
}
"""Filters of the templates."""
