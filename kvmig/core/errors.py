"""One exception tree. Our own mistakes and the peer's are different types."""

from __future__ import annotations

from typing import Literal


class KvmigError(Exception):
    """Base of everything that kvmig raises on purpose."""


class ConfigError(KvmigError):
    """A flag or field holds a value that can't be used; found before anything starts."""


class StartupError(KvmigError):
    """A process could not start; the message names the reason."""


class UnsupportedLayout(KvmigError):
    """The engine keeps its KV cache in an order that the kernels don't handle."""


class KernelUnavailable(KvmigError):
    """No compiled copy library can be loaded, nor built here; the message has the reason."""


class MigrationRefused(KvmigError):
    """A migration can't start or go on; the request stays where it is.

    `reason` is one word for metrics and reports (see `kvmig.kvtransfer.report.Reason`).
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class RequestGone(MigrationRefused):
    """The request finished, was aborted, or was preempted since the last look."""


class NotParked(KvmigError):
    """An engine can't be parked, or is not as it was before; the message has the reason."""


class WeightsInUse(KvmigError):
    """An engine has requests, whose answers other weights would change."""


class TransportError(KvmigError):
    """The data path failed: lost peer, time-out, or a block whose checksum differs."""


class PeerBehind(TransportError):
    """The other side is there, and has not read so much that no more can be sent to it."""


class PeerError(KvmigError):
    """The other side broke the protocol: unknown message, wrong version, bad order.

    `reason` is one word for metrics: unreadable, oversized, version, early (before Hello),
    unexpected, or unusable: what it brings can't be handled.
    """

    def __init__(self, sentence: str, reason: str = "unexpected") -> None:
        super().__init__(sentence)
        self.reason = reason


class InvalidTransition(KvmigError):
    """A machine got an event that its state has no arrow for; its state is unchanged."""

    def __init__(self, key: str, state: str, event: str, history: tuple[str, ...]) -> None:
        super().__init__(f"{key}: no transition for {event} in state {state}; history: {history}")
        self.key = key
        self.state = state
        self.event = event
        self.history = history


Failure = Literal["retry", "final", "quota", "refused"]
"""Why a request can't go on. retry: another attempt may succeed. final: the request is to blame.
quota: that of its key is used up. refused: it asks for what it may not have."""


class NoInstance(KvmigError):
    """No instance can take the request."""


class QuotaUsedUp(KvmigError):
    """The quota of a request's key has no tokens left."""


class AnswerTooLarge(KvmigError):
    """A request's answer would be more than a front end keeps of one call's."""


class ContractViolation(KvmigError):
    """An engine's adapter broke a rule of the Engine port (see `kvmig.engines.checked`)."""

    def __init__(self, rule: str, request_id: str, detail: str, history: tuple[str, ...]) -> None:
        super().__init__(
            f"rule {rule!r} is broken for {request_id or 'the engine'}: {detail};"
            f" history: {' > '.join(history)}"
        )
        self.rule = rule
        self.request_id = request_id
        self.detail = detail
        self.history = history
