"""`python -m kvmig.command LAUNCH --heartbeat-descriptor N`: a deployment that runs a command.

Only a fleet's supervisor starts it. LAUNCH is a `CommandLaunch` in JSON. The end of its stdin ends
it as a signal does: calls that run get their time first.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from kvmig.command.deployment import CommandDeployment
from kvmig.command.launch import CommandLaunch, decode_launch
from kvmig.core.errors import ConfigError, KvmigError
from kvmig.process.child import lead_group, leave, quiet, say
from kvmig.process.sockets import listening_at, raise_open_files

FORM = "python -m kvmig.command LAUNCH --heartbeat-descriptor N"


def main(words: Sequence[str]) -> int:
    """Exit code 0 after a signal, 1 where no server could be started, 2 for wrong words."""
    lead_group()
    quiet("command")
    try:
        if len(words) != 3 or words[1] != "--heartbeat-descriptor" or not words[2].isdecimal():
            raise ConfigError(f"its words are wrong, must be {FORM}")
        launch = decode_launch(words[0])
    except (msgspec.DecodeError, ConfigError) as error:
        say(str(error))
        return 2
    raise_open_files()
    try:
        with listening_at(launch.uds, "uds") as sock:
            uvloop.run(_serve(launch, sock, int(words[2])))
    except KvmigError as error:
        say(str(error))
        return 1
    return 0


async def _serve(launch: CommandLaunch, sock: socket.socket, heartbeat: int) -> None:
    await CommandDeployment(launch, sock).serve(heartbeat)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
