"""Without a file descriptor free, nothing is believed to be gone."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvmig.command.server_pool import answers, client_of
from kvmig.core.errors import TransportError
from kvmig.core.open_files import lacks_descriptor
from kvmig.kvtransfer.transports import descriptors, lane
from kvmig.kvtransfer.transports.descriptors import DescriptorDonor, gone, take
from kvmig.kvtransfer.transports.lane import LaneReceiver, LaneSender
from kvmig.process import fork_server
from kvmig.process.descendants import parents
from kvmig.process.fork_server import ForkedProcess
from kvmig.process.sockets import take_path
from kvmig.process.supervisor import UNSEEN
from kvmig.rpc.codec import RefusalCounter
from kvmig.rpc.unix_packets import UnixPackets
from kvmig.sources.files_folder import MANIFEST, FilesFolder, FilesManifest
from tests.support.open_files import no_descriptor
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (OSError(errno.EMFILE, "too many"), True),
        (OSError(errno.ENFILE, "too many"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False),
        (ValueError("other"), False),
    ],
)
def test_an_error_for_want_of_a_descriptor_is_known_also_as_the_cause_of_another_one(
    error: Exception, lacks: bool
) -> None:
    assert lacks_descriptor(error) is lacks
    with pytest.raises(httpx.ConnectError) as raised:
        raise httpx.ConnectError("all connection attempts failed") from error
    assert lacks_descriptor(raised.value) is lacks


def test_a_donor_is_not_gone() -> None:
    with open(os.devnull) as given:  # noqa: PTH123
        donor = DescriptorDonor(given.fileno(), RefusalCounter())
        with no_descriptor():
            assert not gone(donor.ticket)
            with pytest.raises(TransportError, match="Too many open files"):
                take(donor.ticket, RefusalCounter())
        assert not gone(donor.ticket)
        donor.close()
        assert gone(donor.ticket)


@pytest.fixture
def refused_accepts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each call of `accept` that has failed for want of a descriptor: the first three."""
    calls, accept = list[int](), socket.socket.accept

    def accept_later(sock: socket.socket) -> tuple[socket.socket, Any]:
        if len(calls) < 3:
            calls.append(sock.fileno())
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    monkeypatch.setattr(descriptors, "NO_FILE_S", 0.01)
    monkeypatch.setattr(lane, "NO_FILE_S", 0.01)
    return calls


def test_a_donor_gives_later_what_it_could_not_give_at_once(refused_accepts: list[int]) -> None:
    with open(os.devnull) as given:  # noqa: PTH123
        donor = DescriptorDonor(given.fileno(), RefusalCounter())
        os.close(take(donor.ticket, RefusalCounter()))
        donor.close()
    assert len(refused_accepts) == 3


def test_a_lane_lets_its_source_in_later(refused_accepts: list[int]) -> None:
    with mmap.mmap(-1, 4096) as memory:
        made = LaneReceiver("127.0.0.1", memory, 1, 4096, RefusalCounter())
        sender = LaneSender(made.ticket)
        assert len(refused_accepts) == 3
        assert not made.arrivals.ended
        sender.close()
        made.close()
        wait_until(lambda: made.arrivals.ended)


def test_an_agent_of_a_unit_is_only_not_reached_now(tmp_path: Path) -> None:
    path, words = str(tmp_path / "agent"), r"can't be reached now: .*Too many open files"
    with (
        take_path(path, socket.SOCK_SEQPACKET),
        no_descriptor(),
        pytest.raises(TransportError, match=words),
    ):
        UnixPackets.connect(path, 100)


def test_processes_have_not_ended() -> None:
    with no_descriptor(), pytest.raises(OSError, match="Too many open files"):
        parents()
    assert os.getpid() in parents()


@pytest.fixture
def child() -> Iterator[int]:
    """Process id of a child that doesn't end by itself."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


async def test_a_fork_is_watched_as_soon_as_that_can_be(
    child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "NO_FILE_S", 0.01)
    monkeypatch.setattr(fork_server, "TELL_S", 0.0)
    with no_descriptor():
        fork = ForkedProcess(child)
    fork.kill()
    async with asyncio.timeout(10):
        assert await fork.wait() == UNSEEN


def test_a_whole_folder_of_files_is_not_fetched_again(tmp_path: Path) -> None:
    folder = FilesFolder(tmp_path)
    manifest = FilesManifest("hf:Org/m", "c0ffee", ())
    (folder.whole("m") / MANIFEST).parent.mkdir(parents=True)
    (folder.whole("m") / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    with no_descriptor(), pytest.raises(OSError, match="Too many open files"):
        folder.manifest("m")
    assert folder.manifest("m") == manifest
    assert folder.manifest("other") is None


async def test_a_server_that_was_not_asked_does_not_hang() -> None:
    async with client_of("127.0.0.1:9") as client:
        assert await answers(client, "/health") is False
        with no_descriptor():
            assert await answers(client, "/health") is None
