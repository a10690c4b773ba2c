"""Whose processes listen on a port: a server of another user gets no call of a tenant."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from kvmig.process.port_owners import listeners, strangers_at

NOBODY = 65534
LISTENS = f"""
import os, socket, sys
os.setuid({NOBODY})
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""
TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1001        0 1 1 0
   1: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1002        0 2 1 0
   2: 0100007F:1F90 0100007F:D431 01 00000000:00000000 00:00000000 00000000  1003        0 3 1 0
   3: 0100007F:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1004        0 4 1 0
"""


def test_those_who_listen_are_found_and_those_who_are_connected_are_not() -> None:
    assert listeners(8080, TABLE.splitlines()) == {1001, 1002}
    assert listeners(8081, TABLE.splitlines()) == {1004}
    assert listeners(8082, TABLE.splitlines()) == set()


def test_a_port_of_this_user_has_no_stranger() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert strangers_at(sock.getsockname()[1], os.getpid(), os.getuid()) == set()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_a_port_of_another_user_has_a_stranger_unless_the_server_runs_as_that_user() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdin is not None
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert strangers_at(port, other.pid, os.getuid()) == set()
        with subprocess.Popen(["sleep", "60"]) as own:
            try:
                assert strangers_at(port, own.pid, os.getuid()) == {NOBODY}
            finally:
                own.kill()
        other.stdin.close()
