"""Models as answers, pages and the audit show them: without the secrets in their command lines; and
back again, when one that was shown is changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from kvmig.core.shown_secrets import restored_words, shown_words
from kvmig.fleet.spec import FleetFile, ModelSpec

COMMAND_LINES = ("flags", "command")
"""The fields of a specification that are words of a command line."""

Spec = dict[str, Any]


def shown_spec(spec: Mapping[str, Any]) -> Spec:
    """A specification, as plain values, without its secrets."""
    lines = {name: list(shown_words(spec[name])) for name in COMMAND_LINES if spec.get(name)}
    return {**spec, **lines}


def shown_revision(row: Mapping[str, Any]) -> Spec:
    """A revision of a model, as plain values."""
    return {**row, "spec": shown_spec(row["spec"])}


def shown_change(change: Mapping[str, Any]) -> Spec:
    """A change, or a row of the audit, as plain values: other things than models have no secrets in
    them."""
    sides = {
        side: shown_spec(change[side])
        for side in ("before", "after")
        if isinstance(change[side], dict) and not set(COMMAND_LINES).isdisjoint(change[side])
    }
    return {**change, **sides}


def restored_spec(spec: ModelSpec, kept: ModelSpec | None) -> ModelSpec:
    """A specification that may have been made from a shown one. kept: the model as it is; None:
    there is none. Raises ConfigError for a hidden value that is not known."""
    lines = {
        name: restored_words(
            f"model {spec.name}: {name}", getattr(spec, name), getattr(kept, name, ())
        )
        for name in COMMAND_LINES
    }
    return replace(spec, **lines)


def restored_fleet(fleet: FleetFile, kept: Mapping[str, ModelSpec]) -> FleetFile:
    """The same of a whole file. kept: the models as they are, by name."""
    specs = tuple(restored_spec(one, kept.get(one.name)) for one in fleet.models)
    return replace(fleet, models=specs)
