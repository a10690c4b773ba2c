"""The check of a body stops at the first item of a list that is wrong.

An item of a list that has fifty kinds of items gets fifty reasons why it is none of them; a
thousand such items take a front end's event loop for seconds, and its memory by the gigabyte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from fastapi import FastAPI
from fastapi._compat import ModelField
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import CoreConfig, CoreSchema, SchemaValidator

from kvmig.frontend.openai.vllm.body_checks import CarefulValidator

_LISTS = ("list", "set", "frozenset", "tuple")


def stop_at_first_error(app: FastAPI) -> None:
    """Stop checks at the first error, for the bodies of all routes of the application."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            for field in (*_body_fields(route.dependant), route.body_field):
                if field is not None:
                    _stop(field)


def _body_fields(dependant: Dependant) -> Iterator[ModelField]:
    yield from dependant.body_params
    for one in dependant.dependencies:
        yield from _body_fields(one)


def _stop(field: ModelField) -> None:
    adapter = field._type_adapter
    _mark(adapter.core_schema, set())
    validator = SchemaValidator(adapter.core_schema, cast("CoreConfig", field.config))
    adapter.validator = cast("SchemaValidator", CarefulValidator(validator))


def _mark(node: Any, seen: set[int]) -> None:
    """Mark a schema and the models in it: a model that has one as a field asks that one's check."""
    if id(node) in seen or not isinstance(node, dict | list | tuple):
        return
    seen.add(id(node))
    for one in node.values() if isinstance(node, dict) else node:
        _mark(one, seen)
    if not isinstance(node, dict):
        return
    if node.get("type") in _LISTS and "items_schema" in node:
        node["fail_fast"] = True
    if node.get("type") == "model" and issubclass(node["cls"], BaseModel):
        _rebuild(node["cls"], node, seen)


def _rebuild(model: type[BaseModel], node: dict[str, Any], seen: set[int]) -> None:
    own: Any = model.__pydantic_core_schema__
    if not isinstance(own, dict):
        return  # it has no check of its own yet
    if own is not node:
        _mark(own, seen)
    model.__pydantic_complete__ = False  # or the new check would be the one that it has
    model.__pydantic_validator__ = SchemaValidator(cast("CoreSchema", own))
    model.__pydantic_complete__ = True
