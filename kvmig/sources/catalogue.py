"""The catalogue of models that people run: short names with sources, sizes, licences and flags.
Pure."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable
from math import isfinite
from typing import Literal

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.sources.source import parse_source

Kind = Literal["chat", "embedding"]


class CatalogueModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that is known by a short name."""

    name: str
    source: str
    kind: Kind = "chat"
    parameters: float
    """Billions."""
    gb: float
    """Size of the weights, about."""
    licence: str
    gated: bool = False
    """Whether the hub asks for the acceptance of terms, and for a token."""
    flags: str = ""
    note: str = ""


class ModelCatalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The known models, as a file has them."""

    date: str
    """The day of the last review."""
    models: tuple[CatalogueModel, ...]

    def find(self, name: str) -> CatalogueModel | None:
        """The model of this name, in any case of letters."""
        wanted = name.lower()
        return next((one for one in self.models if one.name.lower() == wanted), None)

    def search(self, words: Iterable[str]) -> list[CatalogueModel]:
        """The models in which each of the words is."""
        wanted = [one.lower() for one in words]
        return [one for one in self.models if all(word in _text(one) for word in wanted)]


def _text(one: CatalogueModel) -> str:
    return " ".join((one.name, one.source, one.kind, one.licence, one.note)).lower()


def read_catalogue(text: str, where: str) -> ModelCatalogue:
    """Read a file. where: it is, for the error. Raises ConfigError."""
    try:
        found = msgspec.convert(tomllib.loads(text), ModelCatalogue)
    except (ValueError, RecursionError) as error:  # msgspec's and tomllib's own are ValueErrors
        raise ConfigError(f"the catalogue {where} can't be used: {error}") from error
    names: set[str] = set()
    for one in found.models:
        try:
            source = parse_source(one.source)
            shlex.split(one.flags)
        except ValueError as error:
            raise ConfigError(f"the catalogue {where}: {one.name}: flags: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"the catalogue {where}: {one.name}: {error}") from error
        if not (isfinite(one.parameters) and isfinite(one.gb)):
            raise ConfigError(
                f"the catalogue {where}: {one.name}: parameters and gb must be finite"
            )
        if not all(text.isprintable() for text in (one.name, one.licence, one.flags, one.note)):
            raise ConfigError(
                f"the catalogue {where}: {one.name!r:.100} has characters that can't be printed"
            )
        if not source.is_remote or one.name.lower() in names or not one.name:
            raise ConfigError(
                f"the catalogue {where}: {one.name!r:.100} must be there once, with a source whose"
                " files can be fetched"
            )
        names.add(one.name.lower())
    return found


def name_for(text: str) -> str:
    """A name for a model that is known by its source alone: `qwen3-0.6b` of hf:Qwen/Qwen3-0.6B."""
    source = parse_source(text)
    plain = re.sub(r"[^a-z0-9._-]+", "-", source.short_name.lower()).strip("-._")
    return re.sub(r"\.gguf$", "", re.sub(r"\.{2,}", ".", plain)) or "model"
