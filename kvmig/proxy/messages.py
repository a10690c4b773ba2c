"""Messages between the server of a fleet and its proxies (msgpack, see
`kvmig.proxy.control_link`)."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Literal

import msgspec

from kvmig.accounts.keys import KeyGrant
from kvmig.accounts.limits import LimitLeft
from kvmig.asgi.body_bounds import ModelReach
from kvmig.core.config import CertificateFiles, HttpConfig
from kvmig.core.priorities import NORMAL, PriorityClass
from kvmig.core.secret import SecretStruct

RouteState = Literal["cold", "starting", "ready", "failed", "off"]


class ProxyLaunch(SecretStruct, frozen=True, kw_only=True):
    """Everything that a proxy must know to start (JSON, on stdin)."""

    name: str
    """Unique among the proxies of all times."""
    number: int = 0
    """The same for the next one in its place."""
    tallies: str = ""
    """Path of the file in which all that share the port count what they let in; empty: it is
    alone."""
    links: str
    """Path of the server's socket for proxies."""
    api: str
    """Path of the server's HTTP API."""
    snapshot: str
    """Path of the file with the last snapshot, which a proxy begins with while there is no
    server."""
    pepper: str = ""
    """Path of the pepper's file. The snapshot is kept without it: neither of the two files alone
    is enough to try keys."""
    shutdown_timeout_s: float = 30.0
    http: HttpConfig = HttpConfig()
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call; `*`: all."""
    certificate: CertificateFiles | None = None
    """Certificate of the port; None: it speaks plain HTTP."""
    relays: bool = False
    """Whether its host stands by: calls go to the host that leads."""


class ModelCard(msgspec.Struct, frozen=True):
    """What a deployment says of its model."""

    created: int = 0
    owned_by: str = "kvmig"
    max_model_len: int | None = None
    reach: ModelReach | None = None
    """What bounds bodies; None: it isn't known."""


class ModelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and where its requests go."""

    name: str
    state: RouteState
    """ready: to its socket. cold, starting: calls wait, and the model must be wanted. failed: they
    get the reason. off: it isn't served."""
    socket: str = ""
    """Path of its deployment's; empty unless it is ready."""
    next_socket: str = ""
    """Path of the socket of a new deployment, which takes over some of the new calls; empty:
    none does."""
    next_percent: int = 0
    """How many of 100 new calls go there."""
    served: str = ""
    """What the deployments call it."""
    why: str = ""
    """Why it has failed; empty otherwise."""
    start_s: float | None = None
    """How long a start takes, by experience."""
    retry_s: float | None = None
    """Time until a failed model is tried again, from when this message was sent."""
    start_timeout_s: float = 600.0
    heartbeat_after_s: float = 10.0
    """Time that a streaming client waits without a byte."""
    max_held: int = 1000
    priority: int = 0
    """Priority of calls that name none. Waiting requests go on by it: smaller ones first."""
    classes: tuple[PriorityClass, ...] = (NORMAL,)
    """Priority classes that calls may name."""
    adapters: tuple[str, ...] = ()
    card: ModelCard = ModelCard()
    """The card of the model's last deployment."""


# -- from the server


class FleetSnapshot(SecretStruct, frozen=True, kw_only=True, tag="Snapshot"):
    """The whole state. First on each connection."""

    version: int
    """Version, which rises with every message of a server."""
    pepper: bytes
    keys: tuple[KeyGrant, ...] = ()
    routes: tuple[ModelRoute, ...] = ()
    aliases: Mapping[str, Mapping[str, int]] = {}
    """Names that stand for models: how many requests of how many each gets."""


class KeyUpdates(SecretStruct, frozen=True, kw_only=True, tag="Keys"):
    """Keys that are new or have changed, and prefixes of those that let nothing in any more."""

    version: int
    changed: tuple[KeyGrant, ...] = ()
    removed: tuple[str, ...] = ()


class RouteChanges(msgspec.Struct, frozen=True, kw_only=True, tag="Routes"):
    """Models that are new or have changed, and names of those that are gone."""

    version: int
    changed: tuple[ModelRoute, ...] = ()
    removed: tuple[str, ...] = ()


class AliasTable(msgspec.Struct, frozen=True, kw_only=True, tag="Aliases"):
    """The aliases, as they are from now on."""

    version: int
    aliases: Mapping[str, Mapping[str, int]]


class QuotaLeft(msgspec.Struct, frozen=True, array_like=True):
    """What is left of one quota."""

    tokens: int
    anew: float | None
    """Unix time from which on there is a whole quota again; None: never."""

    def says_no(self, now: float) -> bool:
        """Whether nothing is left at that Unix time."""
        return self.tokens <= 0 and (self.anew is None or now < self.anew)

    def now(self, whole: int, now: float) -> LimitLeft:
        """What is left at that Unix time of a quota of `whole` tokens."""
        if self.anew is not None and self.anew <= now:
            return LimitLeft(whole, whole, 0.0)
        reset_s = inf if self.anew is None else self.anew - now
        return LimitLeft(max(0, self.tokens), whole, reset_s)


class SpentLimits(msgspec.Struct, frozen=True, kw_only=True, tag="Spent"):
    """What was used of limits; after a snapshot of all that was."""

    owed: Mapping[str, float] = {}
    """Tokens that a rate has not paid off, where there is a `tpm`, by `Limited.id`."""
    left: Mapping[str, QuotaLeft] = {}
    """What is left of quotas, by `Quota.id`."""


class LeadingHost(msgspec.Struct, frozen=True, kw_only=True, tag="Host"):
    """The host that leads, for the relays of a host that stands by."""

    term: int = 0
    """The term of its server; earlier ones are over."""
    door: str = ""
    """HOST:PORT where its proxies take the calls of relays; empty: it has none."""


Known = FleetSnapshot | KeyUpdates | RouteChanges | AliasTable
"""What a proxy keeps."""
Told = Known | SpentLimits
"""The messages for a proxy of the host that leads."""
Down = Told | LeadingHost


# -- from a proxy


class ProxyHello(msgspec.Struct, frozen=True, tag="Hello"):
    """First on each connection."""

    proxy: str


class ModelWanted(msgspec.Struct, frozen=True, tag="Want"):
    """A request waits for the model. May be said again."""

    model: str


class ModelDemand(msgspec.Struct, frozen=True):
    """The demand of one model at one of its deployments, since the last message."""

    model: str
    running: int
    """Requests that are relayed now."""
    held: int
    """Requests that wait now."""
    arrivals: int
    request_s: float
    """Requests that ran or waited, times how long."""
    socket: str = ""
    """The deployment that they are relayed to; empty: they go to none yet."""


class ProxyDemand(msgspec.Struct, frozen=True, tag="Demand"):
    """What clients want of which model. Twice a second, and at once when a version is applied that
    takes a ready route away."""

    version: int
    """Version of the last message that was applied: the proxy now uses only its routes."""
    seconds: float
    """Seconds since the last Demand."""
    models: tuple[ModelDemand, ...] = ()


class ProxyMetrics(msgspec.Struct, frozen=True, tag="Figures"):
    """The proxy's metrics as Prometheus reads them, now and then."""

    text: str


ProxyNews = ModelWanted | ProxyDemand | ProxyMetrics
Up = ProxyHello | ProxyNews
