"""The catalogue of models that people run: short names with sources, sizes, licences and flags.
Pure."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable
from math import isfinite
from typing import Any, Literal

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


class ModelCatalogue(msgspec.Struct, frozen=True):
    """The known models, as a file has them."""

    date: str
    """The day of the last review."""
    models: tuple[CatalogueModel, ...]
    left_out: tuple[str, ...] = ()
    """Why entries can't be used here, such as those of a newer kvmig; each begins with its name."""

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


class _CatalogueFile(msgspec.Struct, frozen=True):
    """A file before its entries are looked at."""

    date: str
    models: tuple[dict[str, Any], ...]


def read_catalogue(text: str, where: str) -> ModelCatalogue:
    """Read a file. An entry that can't be used is left out. where: the file is, for the error.
    Raises ConfigError for what is no catalogue."""
    try:
        found = msgspec.convert(tomllib.loads(text), _CatalogueFile)
    except (ValueError, RecursionError) as error:  # msgspec's and tomllib's own are ValueErrors
        raise ConfigError(f"the catalogue {where} can't be used: {error}") from error
    models: dict[str, CatalogueModel] = {}
    left_out = []
    for at, given in enumerate(found.models, 1):
        try:
            one = _checked(given)
            if one.name.lower() in models:
                raise ConfigError("must be there once")
        except (ValueError, ConfigError) as error:
            left_out.append(f"{given.get('name', f'entry {at}')!a:.100}: {error}")
        else:
            models[one.name.lower()] = one
    return ModelCatalogue(found.date, tuple(models.values()), tuple(left_out))


def _checked(given: dict[str, Any]) -> CatalogueModel:
    """Raises ConfigError and ValueError, as msgspec's own is, where it can't be used."""
    one = msgspec.convert(given, CatalogueModel)
    source = parse_source(one.source)
    try:
        shlex.split(one.flags)
    except ValueError as error:
        raise ConfigError(f"flags: {error}") from error
    if not (isfinite(one.parameters) and isfinite(one.gb)):
        raise ConfigError("parameters and gb must be finite")
    if not all(text.isprintable() for text in (one.name, one.licence, one.flags, one.note)):
        raise ConfigError("it has characters that can't be printed")
    if not source.is_remote or not one.name:
        raise ConfigError("must have a name, and a source whose files can be fetched")
    return one


def name_for(text: str) -> str:
    """A name for a model that is known by its source alone: `qwen3-0.6b` of hf:Qwen/Qwen3-0.6B."""
    source = parse_source(text)
    plain = re.sub(r"[^a-z0-9._-]+", "-", source.short_name.lower()).strip("-._")
    return re.sub(r"\.gguf$", "", re.sub(r"\.{2,}", ".", plain)) or "model"
