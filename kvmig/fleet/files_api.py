"""Routes of models' files (what is on the disk, is fetched, and stays), and of known models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field

from kvmig.asgi.strict_body import StrictBody
from kvmig.fleet.api_paths import routes_at
from kvmig.fleet.catalogue import CatalogueReader
from kvmig.fleet.model_files import ModelFiles
from kvmig.fleet.store import OrderActor
from kvmig.sources.catalogue import CatalogueModel, ModelCatalogue
from kvmig.sources.source import MOST_CHARACTERS

Body = dict[str, Any]
WordsQuery = Annotated[str, Query(max_length=200)]
SourceQuery = Annotated[str, Query(max_length=MOST_CHARACTERS)]


class SourceBody(StrictBody):
    """A source."""

    source: str = Field(max_length=MOST_CHARACTERS, description="Such as hf:ORG/NAME@REVISION.")


class PinBody(SourceBody):
    """Whether its files stay."""

    pinned: bool


def catalogue_api(catalogue: CatalogueReader, caller: Any) -> APIRouter:
    """Route of the models that are known by short names. caller: who calls."""
    api = routes_at("/catalogue")

    @api.get("")
    async def search(name: WordsQuery = "", words: WordsQuery = "", _: OrderActor = caller) -> Body:
        """Models that people run. name: this one alone; words: those that have each of them.
        left_out: entries that this kvmig can't use, each with the reason."""
        found = await catalogue.read()
        if name:
            one = found.find(name)
            return _listed(found, [] if one is None else [one])
        return _listed(found, found.search(words.split()))

    return api


def _listed(catalogue: ModelCatalogue, models: Sequence[CatalogueModel]) -> Body:
    return {
        "date": catalogue.date,
        "data": msgspec.to_builtins(models),
        "left_out": list(catalogue.left_out),
    }


def files_api(files: ModelFiles, caller: Any) -> APIRouter:
    """Routes of files. A source holds slashes, so it is in the body or the query. caller: who
    calls."""
    api = routes_at("/files")

    @api.get("")
    async def list_files(source: SourceQuery = "", _: OrderActor = caller) -> Body:
        """Files that are on the disk, or on their way; source: of this one alone."""
        found = [files.view(source)] if source else files.views()
        return {"data": msgspec.to_builtins(found)}

    @api.post("")
    async def pull_files(body: SourceBody, actor: OrderActor = caller) -> Body:
        """Fetch a source's files; whole ones are compared with their source, and fetched again
        where it has others now."""
        return cast("Body", msgspec.to_builtins(await files.pull(body.source, actor)))

    @api.post("/pin")
    async def pin_files(body: PinBody, actor: OrderActor = caller) -> Body:
        """Keep files in spite of the fleet's limit for files, or no more."""
        found = await files.pin(body.source, body.pinned, actor)
        return cast("Body", msgspec.to_builtins(found))

    @api.delete("")
    async def remove_files(source: SourceQuery, actor: OrderActor = caller) -> Body:
        """Remove files that no model of the catalogue uses; a download of them ends."""
        await files.remove(source, actor)
        return {"source": source}

    return api
