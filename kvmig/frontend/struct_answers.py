"""Structs as answers of the admin API: their JSON, and their schemas in /openapi.json.

FastAPI documents pydantic's models only. A route that answers with a struct declares it by `shows`,
and `add_schemas` adds what msgspec knows of these structs to the description of the API.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from kvmig.asgi.problems import Responses
from kvmig.core.api_records import DrainReport, InstanceRow, ModelBody, RequestRow, RowListing
from kvmig.kvtransfer.report import MigrationReport

INSTANCES, REQUESTS, MIGRATIONS = "Listing_Instance_", "Listing_Request_", "Listing_Migration_"
MODEL, MIGRATION, DRAIN = "ModelBody", "Migration", "DrainReport"
_KINDS = (
    ModelBody,
    RowListing[InstanceRow],
    RowListing[RequestRow],
    RowListing[MigrationReport],
    DrainReport,
)
_NAMES = {
    "RowListing": "Listing", "InstanceRow": "Instance", "RequestRow": "Request",
    "UnitMemory": "OfUnit", "MigrationReport": MIGRATION, "StageReport": "Stage",
}  # fmt: skip
"""Class -> the name that clients' code has of it."""
_REFERENCE = "#/components/schemas/{name}"
_INTERNAL = "epoch"
"""The field of a report that only front ends and llumlets need."""


def shows(name: str, status: HTTPStatus = HTTPStatus.OK) -> Responses:
    """The answer of a route with the struct of this name in /openapi.json."""
    schema = {"$ref": _REFERENCE.format(name=name)}
    return {status.value: {"content": {"application/json": {"schema": schema}}}}


def answer(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """The value as JSON; an infinite number is null there."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def shown_report(report: MigrationReport) -> dict[str, Any]:
    """A migration's report as clients see it."""
    shown: dict[str, Any] = msgspec.to_builtins(report)
    del shown[_INTERNAL]
    return shown


def add_schemas(app: FastAPI) -> None:
    """Let the app's description of its API have the structs that `shows` names."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        found = described()
        found.setdefault("components", {}).setdefault("schemas", {}).update(_schemas())
        return found

    setattr(app, "openapi", openapi)  # noqa: B010 - as FastAPI's manual does


def _schemas() -> dict[str, Any]:
    """Schemas by name. Each field is required: it is written also where it has its default."""
    _, found = msgspec.json.schema_components(_KINDS, ref_template=_REFERENCE)
    text = msgspec.json.encode(found).decode()
    for ours, name in _NAMES.items():
        text = text.replace(ours, name)
    schemas: dict[str, Any] = msgspec.json.decode(text)
    del schemas[MIGRATION]["properties"][_INTERNAL]
    for schema in schemas.values():
        schema["required"] = list(schema["properties"])
        for name, field in schema["properties"].items():
            field.pop("default", None)
            if not any("$ref" in one for one in (field, *field.get("anyOf", ()))):
                field["title"] = name.replace("_", " ").title()  # as pydantic has it for the others
    return schemas
