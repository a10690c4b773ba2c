"""The messages of the server and the supervisor, over a pair of sockets (msgpack, see
`kvmig.rpc.unix_packets`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmig.core.shown_secrets import shown_text

Program = Literal["serve", "unit", "command"]
"""What a deployment runs: a `kvmig.serve`, the agent of a unit (`kvmig.sharing`), or another
engine's servers (`kvmig.command`)."""


class ServerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all orders."""

    term: int = 0
    """The term of the server that gives it, see `kvmig.core.order_fence`."""


class StartDeployment(ServerOrder, frozen=True, tag="Start"):
    """An order to the supervisor: start a program with these words."""

    deployment: str
    """Unique among those of all times."""
    engine: str
    """Empty: it has none."""
    words: tuple[str, ...]
    note: str
    """A note for the server, which may be another one by then: comes back in `DeployedProgram`."""
    log: str
    """Path of its log."""
    program: Program = "serve"


class StopDeployment(ServerOrder, frozen=True, tag="Stop"):
    """An order to the supervisor: let a deployment end; kill: at once."""

    deployment: str
    kill: bool = False


class LoadEngine(ServerOrder, frozen=True, tag="Load"):
    """An order to the supervisor: have the engine's libraries loaded, for deployments will come."""

    engine: str


class CheckFlags(ServerOrder, frozen=True, tag="Check"):
    """An order to the supervisor: let the engine's own parser read these words."""

    check: str
    """Comes back in `FlagsChecked`."""
    engine: str
    words: tuple[str, ...]
    sizes: bool = False
    """Whether to print what the model takes of memory, too."""


class StepDown(ServerOrder, frozen=True, tag=True):
    """The order to end all here: another host's server leads the fleet."""

    leader: str
    """Name of that host."""
    leads: int = 0
    """The term of its server: what servers before it have ordered is refused from now on."""


Order = StartDeployment | StopDeployment | LoadEngine | CheckFlags | StepDown


class DeployedProgram(msgspec.Struct, frozen=True):
    """A deployment that runs."""

    deployment: str
    engine: str
    note: str
    pid: int
    """0: it is just being started."""
    program: Program = "serve"


class DeployedPrograms(msgspec.Struct, frozen=True, tag="Running"):
    """The supervisor's first message: all that runs, whichever server has ordered it."""

    deployments: tuple[DeployedProgram, ...]


class DeploymentStarted(msgspec.Struct, frozen=True, tag="Started"):
    """News of the supervisor: the deployment runs; it reports itself whether it serves."""

    deployment: str
    pid: int


class DeploymentEnded(msgspec.Struct, frozen=True, tag="Ended"):
    """News of the supervisor: the deployment has ended, or couldn't be started."""

    deployment: str
    how: str
    """How it ended, for people."""
    said: str = ""
    """The deployment's own last error message."""

    @property
    def reason(self) -> str:
        """How it ended: in its own words, unless it was killed and has none of it."""
        by_itself = self.how.startswith("exit code") or self.how.startswith("it can't")
        return shown_text(self.said if by_itself and self.said else self.how)


class FlagsChecked(msgspec.Struct, frozen=True, tag="Checked"):
    """News of the supervisor: what is wrong with words that were to be checked; empty: nothing."""

    check: str
    wrong: str
    sizes: str = ""
    """What the model takes, as `kvmig.core.model_sizes` has it; empty: it isn't known."""


class LeaveLead(msgspec.Struct, frozen=True, tag=True):
    """The supervisor's request to let another host's server lead: all ends here."""


News = DeployedPrograms | DeploymentStarted | DeploymentEnded | FlagsChecked | LeaveLead


def encode(message: Order | News) -> bytes:
    """The message as it is sent."""
    return msgspec.msgpack.encode(message)


def order_of(message: bytes) -> Order:
    """Raises msgspec.DecodeError."""
    order: Order = msgspec.msgpack.decode(message, type=Order)
    return order


def news_of(message: bytes) -> News:
    """Raises msgspec.DecodeError."""
    news: News = msgspec.msgpack.decode(message, type=News)
    return news
