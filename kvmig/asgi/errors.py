"""Errors of the gateway's answers, with their HTTP statuses."""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar

from kvmig.controlplane.messages import Refusal
from kvmig.core.errors import KvmigError


class GatewayError(KvmigError):
    """Base of all. status: of the HTTP answer; param: the field that is to blame."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    param: str | None = None


class UnknownRequest(GatewayError):
    """No such request was ever seen, or it is long gone."""

    status = HTTPStatus.NOT_FOUND
    param = "request_id"


class RequestFinished(GatewayError):
    """The request has ended."""

    status = HTTPStatus.CONFLICT
    param = "request_id"


class AmbiguousRequest(GatewayError):
    """The id of a call with several live sequences; the message names them."""

    status = HTTPStatus.CONFLICT
    param = "request_id"


class AlreadyMigrating(GatewayError):
    """The request is being moved."""

    status = HTTPStatus.CONFLICT
    param = "request_id"


class UnknownSession(GatewayError):
    """No request of such a session is remembered."""

    status = HTTPStatus.NOT_FOUND
    param = "session"


class AmbiguousSession(GatewayError):
    """Several accounts have a session of that id."""

    status = HTTPStatus.CONFLICT
    param = "account"


class SessionBusy(GatewayError):
    """A request of the session runs, and moves as requests do; or the session is being moved."""

    status = HTTPStatus.CONFLICT
    param = "session"


class UnknownInstance(GatewayError):
    """No such instance."""

    status = HTTPStatus.NOT_FOUND
    param = "destination"


class SameInstance(GatewayError):
    """The request runs there already."""

    status = HTTPStatus.CONFLICT
    param = "destination"


class NoDestination(GatewayError):
    """No instance is there that the request could be moved to."""

    status = HTTPStatus.CONFLICT


class MigrationDisabled(GatewayError):
    """The cluster was started with --no-migration."""

    status = HTTPStatus.CONFLICT


class InstanceLost(GatewayError):
    """The instance doesn't answer any more."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class InstanceRemoved(InstanceLost):
    """The instance is no longer one of the server's, and what it had is given back."""


class CallTimeout(GatewayError):
    """An instance took too long to answer."""

    status = HTTPStatus.GATEWAY_TIMEOUT


class LauncherGone(GatewayError):
    """No launcher is connected to start or end instances."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class OrderFailed(GatewayError):
    """The launcher refused an order."""

    _STATUS: ClassVar[dict[Refusal, HTTPStatus]] = {
        "unknown": HTTPStatus.NOT_FOUND,
        "conflict": HTTPStatus.CONFLICT,
        "invalid": HTTPStatus.BAD_REQUEST,
        "failed": HTTPStatus.INTERNAL_SERVER_ERROR,
    }

    def __init__(self, refusal: Refusal, sentence: str) -> None:
        super().__init__(sentence)
        self.status = self._STATUS[refusal]


class CallFailed(GatewayError):
    """An engine method raised; the message is the engine's."""
