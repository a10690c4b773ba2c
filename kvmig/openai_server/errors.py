"""What a call can be answered with instead of text."""

from __future__ import annotations

from http import HTTPStatus

from kvmig.gateway.errors import GatewayError


class BadRequest(GatewayError):
    """A field that can't be used."""

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(GatewayError):
    """The call names another model."""

    status = HTTPStatus.NOT_FOUND
    param = "model"


class Failed(GatewayError):
    """The request was begun and can't go on. retry: it may go well another time."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        if retry:
            self.status = HTTPStatus.SERVICE_UNAVAILABLE
