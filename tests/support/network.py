"""Several hosts on one machine: each a network namespace with an address of its own.

A host also has its own /dev/shm and its own disk (`Network.scratch`), so that nothing but the
network connects it to the others. Hosts and wire are gone with the processes that hold them.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

RELAY = Path(__file__).with_name("network_relay.py")
RANGE = "198.18"
"""The range for measuring networks (RFC 2544), which nobody else uses."""
_numbers = itertools.count(os.getpid())
"""Each network has a subnet of its own: several may be there at once."""
HOLD = """mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "$0" && ip link set lo up &&
echo ready && read _"""
TIMEOUT_S = 20.0


class NoNetwork(Exception):
    """This machine can't have such hosts; says why."""


@dataclass(frozen=True)
class Host:
    """address: of the host; process: one that lives in its namespaces."""

    address: str
    process: int

    @property
    def enter(self) -> list[str]:
        """Put before a command, runs it on this host, as the same process."""
        return ["nsenter", f"--target={self.process}", "--net", "--mount", "--uts"]


class Network:
    """So many hosts, and this process as one more (`outside`), all reaching each other."""

    def __init__(self, hosts: int) -> None:
        """Raises NoNetwork."""
        if os.geteuid() != 0:
            raise NoNetwork("network namespaces need root")
        # Short: the paths of Unix sockets have at most 107 characters.
        self.scratch = Path(tempfile.mkdtemp(prefix="kvmig-", dir="/tmp"))
        self._subnet = f"{RANGE}.{next(_numbers) % 254 + 1}"
        self._held: list[subprocess.Popen[str]] = []
        self._delay_s = 0.0
        self._cut: set[tuple[int, int]] = set()
        try:
            devices = [f"kvmig{os.getpid()}n{number}"[-15:] for number in range(hosts + 1)]
            self._relay = self._hold([sys.executable, str(RELAY), *devices])
            self.hosts = [self._host(number, device) for number, device in enumerate(devices[:-1])]
            self.outside = self._address(hosts)
            _up(devices[-1], self.outside, ["ip"])
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise NoNetwork(str(error)) from error
        except BaseException:
            self.close()
            raise

    def _hold(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a process that says when it is ready, and ends when its stdin is closed."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._held.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "ready\n":
            raise NoNetwork(f"{command[0]}: {process.stderr.read().strip().splitlines()[-1:]}")
        return process

    def _host(self, number: int, device: str) -> Host:
        holder = self._hold(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", HOLD, str(self.scratch)]
        )
        host = Host(self._address(number), holder.pid)
        _run(["ip", "link", "set", device, "netns", str(holder.pid)])
        _up(device, host.address, [*host.enter, "ip"])
        return host

    def _address(self, number: int) -> str:
        return f"{self._subnet}.{number + 1}"

    def delay(self, seconds: float) -> None:
        """Let every packet take so long, one way."""
        self._delay_s = seconds
        self._tell()

    def cut(self, one: Host, other: Host) -> None:
        """Let nothing through between the two."""
        self._cut.add((self.hosts.index(one), self.hosts.index(other)))
        self._tell()

    def isolate(self, host: Host) -> None:
        """Let nothing through to or from it."""
        number = self.hosts.index(host)
        self._cut |= {(number, other) for other in range(len(self.hosts) + 1) if other != number}
        self._tell()

    def heal(self) -> None:
        """Undo all cuts."""
        self._cut.clear()
        self._tell()

    def _tell(self) -> None:
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        command = {"delay_s": self._delay_s, "cut": sorted(self._cut)}
        self._relay.stdin.write(json.dumps(command) + "\n")
        self._relay.stdin.flush()
        assert self._relay.stdout.readline() == "done\n"

    def close(self) -> None:
        """End it; what runs on the hosts should have ended before."""
        for process in self._held:
            process.communicate(timeout=TIMEOUT_S)
        self.scratch.rmdir()


@contextmanager
def hosts_or_skip(count: int) -> Iterator[Network]:
    """A network of so many hosts; a test that needs it is skipped where there can be none."""
    try:
        made = Network(count)
    except NoNetwork as error:
        pytest.skip(f"no network namespaces here: {error}")
    with closing(made):
        yield made


def _up(device: str, address: str, ip: Sequence[str]) -> None:
    _run([*ip, "addr", "add", f"{address}/24", "dev", device])
    _run([*ip, "link", "set", device, "mtu", "65535", "up"])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip()}")
