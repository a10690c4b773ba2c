"""What people call a model: one of the fleet, a name of the catalogue, a repository, a source."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from kvmig.cli.client import CallFailure, FleetClient
from kvmig.core.errors import ConfigError
from kvmig.fleet.spec import PATH
from kvmig.sources.catalogue import name_for
from kvmig.sources.source import REPOSITORY, SCHEMES


class KnownModel(NamedTuple):
    """A model as a command is to use it."""

    name: str
    source: str
    flags: str = ""
    shown: dict[str, Any] | None = None
    """The fleet's model; None: the fleet doesn't have it."""


def known_model(client: FleetClient, text: str) -> KnownModel:
    """Find what is meant. Raises ConfigError, CallFailure."""
    every = client.get("models")["data"]
    for one in every:
        if text == one["name"] or text in one["spec"]["aliases"]:
            return KnownModel(one["name"], one["spec"]["source"], shown=one)
    found = known_source(client, text)
    for one in every:
        if one["name"] == found.name or one["spec"]["source"] == found.source:
            same = one["spec"]["source"] == found.source
            if not same:
                raise ConfigError(
                    f"model {found.name} is {one['spec']['source']} in this fleet, not"
                    f" {found.source}: `kvmig model add NAME {found.source}` gives it another name"
                )
            return KnownModel(one["name"], found.source, shown=one)
    return found


def name_here(client: FleetClient, text: str) -> str:
    """The name of a model of the fleet that was given by its name, or by its source as `kvmig run`
    takes it; any other text as it is. Raises CallFailure."""
    every = client.get("models")["data"]
    if any(text == one["name"] for one in every):
        return text
    sources = (text, f"hf:{text}")
    return next((str(one["name"]) for one in every if one["spec"]["source"] in sources), text)


def known_source(client: FleetClient, text: str) -> KnownModel:
    """Find the source of a model that the fleet needn't have. Raises ConfigError, CallFailure."""
    source = given_source(text)
    if source is not None:
        return KnownModel(name_for(source), source)
    listed = client.get("catalogue", name=text)["data"]
    if listed:
        return KnownModel(listed[0]["name"], listed[0]["source"], listed[0]["flags"])
    if (source := hub_source(text)) is not None:
        return KnownModel(name_for(source), source)
    raise CallFailure(
        f"no model {text!r:.150} in this fleet or in its catalogue (`kvmig model search`); a source"
        " such as hf:ORG/NAME works as well"
    )


def source_of(client: FleetClient, text: str) -> str:
    """The source that is meant: of a model of the fleet, or of one that it needn't have.

    Raises ConfigError, CallFailure.
    """
    for one in client.get("models")["data"]:
        if text == one["name"] or text in one["spec"]["aliases"]:
            return str(one["spec"]["source"])
    return known_source(client, text).source


def given_source(text: str) -> str | None:
    """A source with its scheme, or a folder that is there; None: neither."""
    scheme, colon, _ = text.partition(":")
    if colon and scheme in (*SCHEMES, "http") and not text.startswith(PATH):
        return text
    folder = Path(text.removeprefix(PATH))
    if text.startswith((PATH, ".", "/")) or folder.is_dir():
        return PATH + str(folder.absolute())
    return None


def hub_source(text: str) -> str | None:
    """The source of a repository of the Hugging Face Hub, given as ORG/NAME or ORG/NAME@REVISION;
    None: it is none."""
    place = text.partition("@")[0]
    return f"hf:{text}" if place.count("/") == 1 and REPOSITORY.fullmatch(place) else None


def typed_source(text: str) -> str:
    """A source with its scheme, or a folder that is there; else ORG/NAME is a model of the Hugging
    Face Hub, as for `kvmig run`, and anything else a folder that the server may have."""
    if (given := given_source(text)) is not None:
        return given
    if (source := hub_source(text)) is not None:
        print(f"kvmig: there is no folder {text} here: the source is {source}", file=sys.stderr)
        return source
    return PATH + str(Path(text).absolute())
