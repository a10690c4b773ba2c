"""The paths of the server's API."""

from __future__ import annotations

from fastapi import APIRouter

PREFIX = "/kvmig/v2"


def routes_at(path: str = "") -> APIRouter:
    """Routes below a path of the API, as its application takes them: to include them in it would
    make each a second time, which is half of an application's start."""
    return APIRouter(prefix=f"{PREFIX}{path}")
