from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kvmig.ground.errors import TransportError
from kvmig.kvtransfer.transports import descriptors
from kvmig.kvtransfer.transports.descriptors import Donor, take


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = open_descriptors(), threading.active_count()
    yield
    assert (open_descriptors(), threading.active_count()) == before


@pytest.fixture
def donor() -> Iterator[Donor]:
    memory = os.memfd_create("kvmig-test")
    os.write(memory, b"shared")
    made = Donor(memory)
    os.close(memory)
    yield made
    made.close()


def test_who_has_the_ticket_gets_the_same_memory(donor: Donor) -> None:
    for _ in range(2):
        copy = take(donor.ticket)
        assert os.pread(copy, 6, 0) == b"shared"
        assert not os.get_inheritable(copy)
        os.close(copy)


def test_who_has_another_word_gets_nothing(donor: Donor) -> None:
    with pytest.raises(TransportError, match="it refused"):
        take(replace(donor.ticket, secret="00" * descriptors.SECRET_BYTES))


def test_a_donor_that_is_gone_gives_nothing(donor: Donor) -> None:
    donor.close()
    donor.close()
    with pytest.raises(TransportError, match="no descriptor from"):
        take(donor.ticket)


def test_a_peer_that_stands_still_holds_up_no_other(donor: Donor) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(f"\0{donor.ticket.socket}")
        os.close(take(donor.ticket))


def test_a_donor_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind("\0kvmig-test-deaf")
        deaf.listen()
        with pytest.raises(TransportError, match="timed out"):
            take(descriptors.Ticket("kvmig-test-deaf", "00"))
