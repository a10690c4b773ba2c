"""The settings of a fleet, and where its files are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvmig.accounts.people import LoginTerms, check_terms
from kvmig.asgi.certificate import load_certificate
from kvmig.core.config import CertificateFiles
from kvmig.core.errors import ConfigError
from kvmig.core.secret import SecretStruct
from kvmig.core.shown_urls import shown_url
from kvmig.fleet.device_room import Strategy
from kvmig.fleet.node_reserve import parse_ladder

DATA = "KVMIG_DATA"
"""Environment variable: the fleet's folder, where `--data` doesn't say."""
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@\"',]+")
"""Pattern of an origin as a browser sends it."""
SOCKET_BYTES = 107
"""Longest path of a Unix socket."""


class FleetSettings(SecretStruct, frozen=True, kw_only=True):
    """Flags of `kvmig up`; every process of the fleet gets them."""

    data: str
    """The folder, with its whole path."""
    host: str = "127.0.0.1"
    port: int = 8080
    proxies: int = 1
    database: str = ""
    """A URL of SQLAlchemy's; empty: SQLite in the folder. It may hold a password."""
    threads: int = 1
    """OpenMP threads of an instance on a CPU."""
    memory: int = 0
    """Bytes of the host's that all models may take together; 0: all that there is."""
    files_bytes: int = 0
    """Bytes of the disk that fetched files of models may take; files that are neither used nor
    pinned go for others. 0: no limit."""
    hub_port: int = 0
    """Port of the fleet's mirror of the hub, on this host alone; 0: it has none."""
    hub_bytes: int = 0
    """Bytes of the disk that the mirror's files may take; 0: no limit."""
    catalogue: str = ""
    """File, with its whole path, or URL of known models; empty: the list that comes with kvmig."""
    ray: str = ""
    """The Ray cluster on whose nodes instances run: HOST:PORT of its head, or auto. Empty: they run
    on this host."""
    reserve: str = ""
    """How many nodes Ray's autoscaler keeps to spare (`kvmig.fleet.node_reserve`); empty: it is not
    asked for any."""
    reserve_node: Mapping[str, float] = {}
    """Amounts of a spare node, by Ray's names; empty: as the largest one has them."""
    gpu_placement: Strategy = "spread"
    """Whether instances prefer the GPU with the fewest instances, then the emptiest, or the fullest
    one that has room."""
    shutdown_timeout_s: float = 30.0
    """Time that the end of a deployment gives running requests."""
    keep_usage_days: int = 400
    """Days that a call's row stays in the ledger; 0: no limit."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call models; `*`: all."""
    certificate: CertificateFiles | None = None
    """Certificate of the port; None: it speaks plain HTTP."""
    allow_commands: bool = False
    """Whether admins may add models whose servers are programs of this host."""
    login: LoginTerms | None = None
    """How people log in; None: they get their keys from admins."""
    standby: bool = False
    """Whether this host waits while the server of another one leads, and takes over from it."""
    peer_port: int = 0
    """Port on `host` at which the hosts that stand by relay calls while this one serves; 0: a free
    one."""

    @property
    def scheme(self) -> str:
        """How clients' URLs begin."""
        return "http" if self.certificate is None else "https"

    @property
    def url(self) -> str:
        """The address at which this host serves clients."""
        return f"{self.scheme}://{host_and_port(self.host, self.port)}"

    def path(self, *parts: str) -> Path:
        """The path of a file in the folder."""
        return Path(self.data, *parts)

    @property
    def database_url(self) -> str:
        """The URL of the database with catalogue and accounts."""
        return self.database or f"sqlite:///{self.path('kvmig.sqlite')}"

    @property
    def api(self) -> Path:
        """The server's HTTP API."""
        return self.path("run", "api.sock")

    @property
    def links(self) -> Path:
        """The socket on which the server serves proxies."""
        return self.path("run", "proxies.sock")

    def fork_server(self, engine: str) -> str:
        """The path of the socket of an engine's fork server."""
        return str(self.path("run", f"forks-{engine}.sock"))

    def deployment(self, deployment: str) -> Path:
        """The socket of one."""
        return self.path("run", f"d-{deployment}.sock")

    def unit(self, name: str) -> Path:
        """The socket of a unit's agent: the same for all its agents."""
        return self.path("run", f"u-{blake2b(name.encode(), digest_size=4).hexdigest()}.sock")

    @property
    def quotas(self) -> Path:
        """The socket on which front ends ask for tokens of quotas."""
        return self.path("run", "quotas.sock")

    @property
    def spools(self) -> Path:
        """The folder of files in which front ends keep what calls use."""
        return self.path("spools")

    @property
    def files(self) -> Path:
        """The folder of models' files that were fetched."""
        return self.path("files")

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.path("logs", f"{name}.log")


def host_and_port(host: str, port: int) -> str:
    """HOST:PORT as URLs have it: addresses of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def data_folder(given: str) -> str:
    """The folder of `--data`, of the environment, or the user's own; with its whole path."""
    usual = Path(os.environ.get("XDG_DATA_HOME", "~/.local/share"), "kvmig")
    return str(Path(given or os.environ.get(DATA) or usual).expanduser().absolute())


def certificate_files(cert: str, key: str) -> CertificateFiles | None:
    """What `--tls-cert` and `--tls-key` name; None: neither is given. Raises ConfigError."""
    for given, other, flag, missing in (
        (cert, key, "--tls-cert", "--tls-key"),
        (key, cert, "--tls-key", "--tls-cert"),
    ):
        if given and not other:
            raise ConfigError(f"{flag} is {given!r:.200}, must be given together with {missing}")
    return CertificateFiles(str(Path(cert).absolute()), str(Path(key).absolute())) if cert else None


def check_settings(settings: FleetSettings) -> FleetSettings:
    """Returns the settings unchanged. Raises ConfigError with flag, value and what is allowed."""
    for flag, value, least, most in (
        ("--port", settings.port, 1, 65535),
        ("--hub-port", settings.hub_port, 0, 65535),
        ("--peer-port", settings.peer_port, 0, 65535),
        ("--hub-disk", settings.hub_bytes, 0, 1 << 60),
        ("--proxies", settings.proxies, 1, 64),
        ("--threads", settings.threads, 1, 4096),
        ("--memory", settings.memory, 0, 1 << 50),
        ("--model-files", settings.files_bytes, 0, 1 << 60),
        ("--shutdown-timeout", settings.shutdown_timeout_s, 0, 86400),
        ("--keep-usage-days", settings.keep_usage_days, 0, 36500),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{flag} is {value:g}, must be {least} to {most}")
    known = settings.catalogue
    if known and not known.startswith("https://") and not Path(known).is_file():
        raise ConfigError(f"--catalogue is {known!r:.200}, must be a file, or a URL with https://")
    for origin in settings.allowed_origins:
        if ORIGIN.fullmatch(origin) is None:
            raise ConfigError(
                f"--allowed-origins is {origin!r:.150}, must be as https://chat.example.com, or *"
                " for all; given several times for several"
            )
    _check_ray(settings)
    _check_hosts(settings)
    if settings.login is not None:
        check_terms(settings.login)
    if settings.certificate is not None:
        load_certificate(settings.certificate)
    longest = settings.path("run", "d-" + "0" * 8 + ".sock")
    if len(os.fsencode(longest)) > SOCKET_BYTES:
        raise ConfigError(
            f"--data is {settings.data}, must be {SOCKET_BYTES - 20} bytes or less: Unix sockets"
            " in it have short names only"
        )
    return settings


def _check_hosts(settings: FleetSettings) -> None:
    """Raises ConfigError for what several hosts of one fleet can't have."""
    if settings.peer_port and not settings.standby:
        raise ConfigError(
            f"--peer-port is {settings.peer_port}, must be given together with --standby"
        )
    if settings.standby and not settings.database.startswith("postgresql"):
        given = repr(shown_url(settings.database)[:100]) if settings.database else "SQLite's file"
        raise ConfigError(
            f"--standby is given, --database is {given}, must be PostgreSQL: a file has one server,"
            " on its own host"
        )


def _check_ray(settings: FleetSettings) -> None:
    """Raises ConfigError for flags that don't go with --ray, or not without it."""
    if settings.memory and settings.ray:
        raise ConfigError(
            f"--memory is {settings.memory}, must be left out with --ray: the free memory of each"
            " worker counts"
        )
    parse_ladder(settings.reserve)
    if settings.reserve and not settings.ray:
        raise ConfigError(
            f"--reserve is {settings.reserve!r:.100}, must be given together with --ray: Ray's"
            " autoscaler starts nodes"
        )
    if settings.reserve_node and not settings.reserve:
        given = msgspec.json.encode(settings.reserve_node).decode()
        raise ConfigError(f"--reserve-node is {given:.100}, must be given together with --reserve")
    if settings.standby and settings.ray:
        raise ConfigError(
            f"--ray is {settings.ray!r:.100}, must not be given together with --standby"
        )


def make_folders(settings: FleetSettings) -> None:
    """The folder and what is in it, for this user alone. Raises ConfigError.

    A folder that others use for something else is left as it is.
    """
    whole = settings.path()
    try:
        if whole.exists() and (wrong := _not_ours(whole)):
            raise ConfigError(f"--data is {settings.data}, {wrong}")
        for folder in (whole, settings.path("run"), settings.path("logs"), settings.spools):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"--data {settings.data} can't be used: {error}") from error


def _not_ours(folder: Path) -> str:
    """Why an existing folder isn't taken; empty: it is a fleet's, is empty, or for us alone.

    Raises OSError.
    """
    found = folder.stat()
    if not folder.is_dir():
        return "must be a folder"
    if found.st_uid != os.geteuid():
        return f"a folder of user {found.st_uid}, must be this user's"
    alone = not found.st_mode & 0o077
    if alone or (folder / "run").is_dir() or not any(folder.iterdir()):
        return ""
    return (
        "a folder with other files, which others may read; must be a new one, an empty one, or for"
        " this user alone (chmod 700)"
    )


def environment_of(settings: FleetSettings) -> dict[str, str]:
    """The one environment of fork servers and deployments (see `kvmig.process.fork_server`)."""
    # A thread count that instances of all deployments share, for it is read at the import.
    return {"OMP_NUM_THREADS": str(settings.threads), **os.environ}


class ServerLaunch(msgspec.Struct, frozen=True):
    """What the supervisor sends to the server at its start (JSON, on stdin)."""

    settings: FleetSettings
    running: tuple[str, ...] = ()
    """Deployments that run when it starts."""
    door: str = ""
    """HOST:PORT for the relays of other hosts, without HOST where it is all addresses of this host;
    empty: there are none."""
