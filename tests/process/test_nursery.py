"""One fork server for all servers of a host: who may use it, what a fork is like, who may die."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmig.core.errors import StartupError
from kvmig.launcher.shared_fork_server import AT_ONCE
from kvmig.process.fork_server import (
    HANDED,
    ForkDone,
    ForkExited,
    ForkOrder,
    digest,
    join,
    likeness,
    receive_news,
    send_order,
)
from kvmig.process.supervisor import UNSEEN
from kvmig_tools.nursery import Nursery, forked_for
from tests.support.leaks import Footprint
from tests.support.toys import Toys
from tests.support.waiting import wait_until

ROOT = str(Path(__file__).parents[2])
PATIENCE_S = 30.0
OURS = {"SOME_VARIABLE": "some text", "CUDA_VISIBLE_DEVICES": "", **os.environ}


@pytest.fixture(scope="module")
def toy_nursery() -> Iterator[Nursery]:
    """It loads in a moment."""
    with Nursery("toy", OURS) as made:
        yield made


class Asked:
    """A process that is forked for this test, with pipes as its stdin and stdout."""

    def __init__(
        self,
        address: str,
        base: Mapping[str, str],
        status: int = 0,
        words: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self.nursery = join(address, {})
        self.nursery.settimeout(PATIENCE_S)
        stdin, self.told = os.pipe()
        said, stdout = os.pipe()
        self._said = os.fdopen(said)
        variables = {**base, **environment}
        order = ForkOrder("tests.support.forked", [str(status), *words], variables)
        send_order(self.nursery, order, (stdin, stdout, 2, stdin))
        os.close(stdin)
        os.close(stdout)
        news = receive_news(self.nursery)
        assert isinstance(news, ForkDone)
        self.pid = news.pid

    def found(self) -> dict[str, Any]:
        """What it says of itself."""
        found: dict[str, Any] = json.loads(self._said.readline())
        return found

    def end(self) -> None:
        """Let it end."""
        os.close(self.told)
        self.told = -1

    def close(self) -> None:
        """Whatever came."""
        self.nursery.close()
        self._said.close()
        if self.told >= 0:
            os.close(self.told)


@pytest.fixture
def asked(toy_nursery: Nursery) -> Iterator[Asked]:
    made = Asked(
        toy_nursery.address,
        toy_nursery.environment,
        3,
        SOME_VARIABLE="other text",
        KVMIG_SECRET="a secret",
    )
    yield made
    made.close()


# -- what a fork is like


def test_a_fork_is_like_a_process_that_was_started(asked: Asked, toy_nursery: Nursery) -> None:
    found = asked.found()

    given = {"SOME_VARIABLE": "other text", "KVMIG_SECRET": "a secret"}
    assert found["environment"] == {**toy_nursery.environment, **given}
    assert found["argv"][:2] == ["tests.support.forked", "3"]
    assert found["group"], "a signal for the nursery's group isn't for this process"
    assert found["open files"][0] == found["open files"][1]


def test_the_title_of_a_fork_shows_no_secret_of_its_words(toy_nursery: Nursery) -> None:
    words = ("--hf-token", "hf_ofSomebody", "--port=1")
    asked = Asked(toy_nursery.address, toy_nursery.environment, 0, words)
    try:
        found = asked.found()
        title = " ".join(psutil.Process(asked.pid).cmdline())
    finally:
        asked.close()

    assert found["argv"][:5] == ["tests.support.forked", "0", *words]
    assert "--port=1" in title
    assert "hf_ofSomebody" not in title


def test_a_fork_has_the_descriptors_that_it_was_given_and_none_of_the_nurserys(
    asked: Asked,
) -> None:
    found = asked.found()

    (given,) = found["argv"][2:]
    listing = 1  # of the folder itself
    assert len(found["descriptors"]) == 3 + 1 + listing
    assert {0, 1, 2, int(given)} <= set(found["descriptors"])


def test_how_a_fork_ends_is_told_to_whoever_ordered_it(asked: Asked, toy_nursery: Nursery) -> None:
    other = Asked(toy_nursery.address, toy_nursery.environment)
    asked.end()

    assert receive_news(asked.nursery) == ForkExited(asked.pid, 3)
    os.kill(other.pid, signal.SIGKILL)
    assert receive_news(other.nursery) == ForkExited(other.pid, -9)
    other.close()


def test_a_fork_whose_client_has_gone_goes_on_and_is_reaped(
    asked: Asked, toy_nursery: Nursery
) -> None:
    asked.nursery.close()
    asked.found()
    assert psutil.pid_exists(asked.pid)
    asked.end()

    wait_until(lambda: not psutil.pid_exists(asked.pid))


# -- who may have one


def test_only_the_nurserys_user_can_connect(toy_nursery: Nursery) -> None:
    path = Path(toy_nursery.address)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_not_forked_for_even_where_the_files_would_let_it(
    toy_nursery: Nursery,
) -> None:
    path = Path(toy_nursery.address)
    ask = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
    ask += "s.connect(sys.argv[1]); print(s.recv(100))"
    path.chmod(0o666)
    path.parent.chmod(0o755)
    try:
        done = subprocess.run(
            ["/usr/bin/env", "python3", "-c", ask, str(path)],
            user=65534, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    finally:
        path.parent.chmod(0o700)
        path.chmod(0o600)
    assert done.stdout == "b''\n", done.stderr


def test_a_fork_server_of_another_user_is_not_joined(
    toy_nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(StartupError, match="is another user's"):
        join(toy_nursery.address, {})


def test_whoever_speaks_otherwise_is_dropped_and_the_others_are_not(
    toy_nursery: Nursery, asked: Asked
) -> None:
    stranger = join(toy_nursery.address, {})
    stranger.settimeout(PATIENCE_S)
    stranger.send(b"fork, please")

    assert receive_news(stranger) is None
    asked.end()
    assert receive_news(asked.nursery) == ForkExited(asked.pid, 3)
    stranger.close()


DIFFERENT: dict[str, Callable[[], object]] = {
    "working directory": lambda: os.chdir("/"),
    "user and rights": lambda: os.umask(0o027),
    "limits": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    "priority": lambda: os.nice(3),
    "session": os.setsid,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_a_fork_could_not_change_is_told_apart(name: str) -> None:
    script = (
        "import json; from kvmig.process.fork_server import likeness; print(json.dumps(likeness()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=DIFFERENT[name],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert {one for one, value in likeness().items() if found[one] != value} == {name}


def test_an_environment_differs_by_what_libraries_may_have_read_of_it() -> None:
    ours = digest(OURS)
    assert digest({**OURS, "OMP_NUM_THREADS": "7"}) != ours
    assert digest({**OURS, "LD_PRELOAD": "libtcmalloc.so"}) != ours
    assert digest({**OURS, "CUDA_VISIBLE_DEVICES": "3", "KVMIG_SECRET": "x", HANDED: "y"}) == ours
    assert digest({**OURS, "PS1": "(.venv) ", "SHLVL": "2", "OLDPWD": "/"}) == ours


# -- servers


@pytest.mark.server
def test_a_server_and_its_instances_are_forked_and_ended_as_if_started(
    toy_nursery: Nursery, tmp_path: Path
) -> None:
    with Toys([], tmp_path, nursery=toy_nursery) as served:
        footprint = Footprint.of(served)
        parents = {one.ppid() for one in footprint.named("kvmig.launcher.llumlet_main")}
        assert served.process is not None
        parents.add(psutil.Process(served.process.pid).ppid())
        assert toy_nursery.process is not None
        assert parents == {toy_nursery.process.pid}
        assert served.stop() == 0
    footprint.assert_gone()
    join(toy_nursery.address, {}).close()


@pytest.mark.server
def test_instances_of_a_launcher_that_is_killed_go_with_it(
    toy_nursery: Nursery, tmp_path: Path
) -> None:
    with Toys([], tmp_path, nursery=toy_nursery) as served:
        footprint = Footprint.of(served)
        assert len(footprint.named("kvmig.launcher.llumlet_main")) == 2
        assert served.stop(signal.SIGKILL) == -9
    footprint.assert_gone(PATIENCE_S)


@pytest.mark.server
def test_a_server_goes_on_without_its_nursery_and_its_instances_come_back(tmp_path: Path) -> None:
    def states() -> list[str]:
        return [row["state"] for row in served.get("instances")]

    with Nursery("toy", OURS) as nursery, Toys([], tmp_path, nursery=nursery) as served:
        assert nursery.process is not None
        nursery.process.kill()
        nursery.process.wait()
        footprint = Footprint.of(served)
        llumlet, *_ = footprint.named("kvmig.launcher.llumlet_main")
        llumlet.kill()
        wait_until(lambda: "is gone (its exit code is not known)" in served.output())
        wait_until(lambda: states() == ["serving"] * 2)
        assert served.stop() == UNSEEN
    footprint.assert_gone(PATIENCE_S)


@pytest.mark.server
def test_a_nursery_that_shall_end_takes_nobody_new_and_waits_for_its_servers(
    tmp_path: Path,
) -> None:
    with Nursery("toy", OURS) as nursery:
        assert nursery.process is not None
        assert nursery.process.stdin is not None
        with Toys([], tmp_path, nursery=nursery) as served:
            nursery.process.stdin.close()
            wait_until(lambda: not nursery.listens())
            assert [row["state"] for row in served.get("instances")] == ["serving"] * 2
            assert nursery.process.poll() is None
        assert nursery.process.wait(PATIENCE_S) == 0
        assert not Path(nursery.address).exists()


def test_one_that_ends_at_once_does_so_with_its_stdin_and_its_forks_go_on(tmp_path: Path) -> None:
    address = str(tmp_path / "socket")
    command = [sys.executable, "-m", "kvmig.launcher.shared_fork_server", "toy", address, AT_ONCE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**OURS, "PYTHONPATH": ROOT}) as one:
        assert one.stdin is not None
        wait_until(lambda: Path(address).exists())
        forked = Asked(address, {**OURS, "PYTHONPATH": ROOT})
        one.stdin.close()
        assert one.wait(PATIENCE_S) == 0
    assert not Path(address).exists()
    assert forked.found()
    assert psutil.pid_exists(forked.pid)
    forked.close()


STARTS_A_SERVER = """
import sys, time
from pathlib import Path
from kvmig_tools.nursery import Nursery, forked_for
from tests.support.toys import Toys
with Nursery("toy") as nursery, Toys([], Path(sys.argv[1]), nursery=nursery) as served:
    print(nursery.process.pid, served.process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.server
def test_nothing_is_left_of_a_program_that_is_killed_with_its_nursery_and_server(
    tmp_path: Path,
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", STARTS_A_SERVER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ROOT}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with program:
        try:
            assert program.stdout is not None
            nursery, server = map(int, program.stdout.readline().split())
            left = [psutil.Process(pid) for pid in (nursery, server, *forked_for(server))]
        finally:
            program.kill()
    assert len(left) >= 4, "with both instances, and the scheduler, if it was there"
    _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.server
def test_a_server_that_a_fork_could_not_be_like_starts_in_the_usual_way(
    toy_nursery: Nursery, tmp_path: Path
) -> None:
    other = {"OMP_NUM_THREADS": "7"}
    with Toys([], tmp_path, nursery=toy_nursery, environment=other) as served:
        assert isinstance(served.process, subprocess.Popen)
        children = psutil.Process(served.process.pid).children(recursive=True)
        assert [one for one in children if "kvmig.launcher.llumlet_main" in " ".join(one.cmdline())]
        words = "differs in the environment of instances; this server starts its own"
        assert words in served.output()


# -- its start


def started(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvmig.launcher.shared_fork_server", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("words", [[], ["toy"], ["nonsense", "/tmp/x"]])
def test_what_it_is_started_with_is_checked(words: list[str]) -> None:
    done = started(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "kvmig: usage: python -m kvmig.launcher.shared_fork_server ENGINE SOCKET [at-once]; ENGINE"
    )


def test_a_socket_that_another_listens_on_is_left_alone(toy_nursery: Nursery) -> None:
    done = started("toy", toy_nursery.address)
    assert done.returncode == 2
    assert f"SOCKET {toy_nursery.address} can't be used: " in done.stderr
    join(toy_nursery.address, {}).close()


def test_a_socket_that_a_killed_one_has_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))
    done = started("toy", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert not path.exists()
