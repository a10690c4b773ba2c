from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import replace

from kvmig.core.errors import TransportError
from kvmig.kvtransfer.transports import descriptors
from kvmig.kvtransfer.transports.cuda_ipc import IpcPlace
from kvmig.kvtransfer.transports.descriptors import DescriptorDonor, take
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from kvmig.rpc.codec import RefusalCounter

WAIT_S = 20.0


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def connected(name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(WAIT_S)
    made.connect(f"\0{name}")
    return made


def heard(peer: socket.socket) -> bytes:
    """All until the other end closes. What it sent and we didn't read makes that an error."""
    with contextlib.suppress(ConnectionResetError):
        return peer.recv(100)
    return b""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = open_descriptors(), threading.active_count()
    yield
    assert (open_descriptors(), threading.active_count()) == before


@pytest.fixture
def refusals() -> RefusalCounter:
    return RefusalCounter()


@pytest.fixture
def donor(refusals: RefusalCounter) -> Iterator[DescriptorDonor]:
    memory = os.memfd_create("kvmig-test")
    os.write(memory, b"shared")
    made = DescriptorDonor(memory, refusals)
    os.close(memory)
    yield made
    made.close()


def test_who_has_the_ticket_gets_the_same_memory(
    donor: DescriptorDonor, refusals: RefusalCounter
) -> None:
    for _ in range(2):
        copy = take(donor.ticket, refusals)
        assert os.pread(copy, 6, 0) == b"shared"
        assert not os.get_inheritable(copy)
        os.close(copy)
    assert refusals.counts() == {}


def test_who_has_another_word_gets_nothing_and_is_counted(
    donor: DescriptorDonor, refusals: RefusalCounter
) -> None:
    with pytest.raises(TransportError, match="it refused"):
        take(replace(donor.ticket, secret="00" * descriptors.SECRET_BYTES), refusals)
    assert refusals.counts() == {"unauthenticated": 1}


@pytest.mark.parametrize("said", [b"", b"half", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_is_counted_whatever_it_says(
    said: bytes, donor: DescriptorDonor, refusals: RefusalCounter
) -> None:
    for leaves in (True, False):
        with connected(donor.ticket.socket) as stranger:
            stranger.sendall(said)
            if leaves:
                stranger.shutdown(socket.SHUT_WR)
            assert heard(stranger) == b""
    assert refusals.counts() == {"unauthenticated": 2}
    os.close(take(donor.ticket, refusals))


def test_another_users_process_gets_nothing_whatever_it_knows(
    donor: DescriptorDonor, refusals: RefusalCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as others:
        others.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with connected(donor.ticket.socket) as stranger:
            with contextlib.suppress(OSError):  # it was closed to us at once
                stranger.sendall(bytes.fromhex(donor.ticket.secret))
            assert heard(stranger) == b""
    assert refusals.counts() == {"unauthenticated": 1}
    os.close(take(donor.ticket, refusals))


def test_the_word_is_not_told_to_another_users_socket(
    refusals: RefusalCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
        squatter.bind("\0kvmig-test-squatter")
        squatter.listen()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        ticket = descriptors.DescriptorTicket(
            "kvmig-test-squatter", "00" * descriptors.SECRET_BYTES
        )
        with pytest.raises(TransportError, match="another user's socket"):
            take(ticket, refusals)
        squatter.settimeout(WAIT_S)
        came, _ = squatter.accept()
        with came:
            assert heard(came) == b""
    assert refusals.counts() == {"unauthenticated": 1}


def test_strangers_at_an_inbox_are_counted_where_its_process_counts(
    gpus: None, refusals: RefusalCounter
) -> None:
    site = TransportSite(refusals=refusals, gpu=0)
    staging = open_staging("cuda-ipc", "test", "a", 1, 4096, site)["cuda-ipc"]
    inbox = open_offer([staging.offer()], "cuda-ipc", site)
    with connected(
        msgspec.json.decode(inbox.token, type=IpcPlace).exported.ticket.socket
    ) as stranger:
        stranger.sendall(bytes(descriptors.SECRET_BYTES))
        assert heard(stranger) == b""
    inbox.close()
    staging.close()
    assert refusals.counts() == {"unauthenticated": 1}


def test_a_donor_that_is_gone_gives_nothing(
    donor: DescriptorDonor, refusals: RefusalCounter
) -> None:
    donor.close()
    donor.close()
    with pytest.raises(TransportError, match="no descriptor from"):
        take(donor.ticket, refusals)


def test_a_peer_that_stands_still_holds_up_no_other(
    donor: DescriptorDonor, refusals: RefusalCounter
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(f"\0{donor.ticket.socket}")
        os.close(take(donor.ticket, refusals))


def test_a_donor_that_stands_still_is_given_up(
    refusals: RefusalCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind("\0kvmig-test-deaf")
        deaf.listen()
        with pytest.raises(TransportError, match="timed out"):
            take(descriptors.DescriptorTicket("kvmig-test-deaf", "00"), refusals)
