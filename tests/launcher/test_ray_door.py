"""A Ray cluster that doesn't let this process in: one sentence that says what to do, soon.

The heads are Ray's own, each alone on a free port; no node of theirs is on this machine.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmig.core.errors import ConfigError
from kvmig.launcher import ray_cluster, ray_door
from kvmig.launcher.ray_door import MODE, TOKEN, TOKEN_PATH, refusal, token_here, within
from kvmig.process.sockets import free_port
from tests.support.waiting import wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from ray import _raylet

GIVEN = "f" * 32


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One without a token."""
    (found := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(found))
    monkeypatch.setattr(ray_door, "NODE_S", 0.0)
    for name in (MODE, TOKEN, TOKEN_PATH, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # what is set later is undone, too
        monkeypatch.delenv(name)
    yield found
    monkeypatch.undo()
    raylet: Any = _raylet  # its types leave these out
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


# -- an address of a cluster that is gone


@pytest.fixture
def stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What listens where Ray's file says that the machine's cluster is: no head."""
    from ray._private import services

    def none_runs() -> frozenset[str]:
        return frozenset()

    none_runs.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(services, "find_gcs_addresses", none_runs)  # of others on this machine
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    own = services.resolve_ip_for_localhost("127.0.0.1")  # auto asks the machine's own address
    with closing(socket.create_server((own, 0))) as listening:
        address = f"{own}:{listening.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        yield listening


def test_auto_with_the_address_of_a_cluster_that_is_gone_is_refused_at_once(
    stale: socket.socket,
) -> None:
    port = stale.getsockname()[1]
    stale.close()
    with pytest.raises(ConfigError, match=rf"auto \(.*:{port}\), but no Ray cluster answers there"):
        ray_cluster.connect("auto")


IN_TIME = """
import time
from ray._private import services
from kvmig.core.errors import ConfigError
from kvmig.launcher import ray_cluster, ray_door

services.find_gcs_addresses = lambda: frozenset()
services.find_gcs_addresses.cache_clear = lambda: None
ray_door.JOIN_S = 0.5
began = time.monotonic()
try:
    ray_cluster.connect("auto")
except ConfigError as error:
    print(error, int(time.monotonic() - began))
"""


def test_auto_with_the_address_of_a_cluster_that_does_not_answer_is_refused_in_time(
    stale: socket.socket,
) -> None:
    command = [sys.executable, "-c", IN_TIME]  # Ray's thread goes on, and ends with the process
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    said, seconds = done.stdout.strip().rsplit(maxsplit=1)
    assert "but that cluster can't be joined within 0.5 s: if it is gone, start it" in said
    assert int(seconds) < 5


def test_auto_without_any_cluster_says_how_to_make_one(
    stale: socket.socket, tmp_path: Path
) -> None:
    (tmp_path / "ray" / "ray_current_cluster").unlink()
    with pytest.raises(ConfigError, match="this machine is no node of a Ray cluster: make it one"):
        ray_cluster.connect("auto")


def test_an_address_of_a_variable_that_ray_cannot_take_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(ConfigError, match="RAY_ADDRESS is 'local', must be auto or HOST:PORT"):
        ray_cluster.connect("auto")


def test_what_is_run_within_a_time_hands_on_what_it_raises() -> None:
    def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        within(60, fail)


# -- where a token is


def test_a_token_is_found_where_ray_finds_it(home: Path) -> None:
    assert token_here({}) == ""
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(GIVEN)
    assert token_here({}) == "~/.ray/auth_token"
    named = {TOKEN_PATH: str(home / ".ray" / "auth_token")}
    assert token_here(named) == TOKEN_PATH
    assert token_here({**named, TOKEN: GIVEN}) == TOKEN


def test_a_file_without_a_token_is_named(home: Path) -> None:
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH is /nowhere, which can't be read"):
        token_here({TOKEN_PATH: "/nowhere"})
    (home / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="which is empty, must hold a token"):
        token_here({TOKEN_PATH: str(home / "empty")})


@pytest.mark.parametrize("here", ["", TOKEN, TOKEN_PATH])
@pytest.mark.parametrize("mode", ["", "token", "disabled"])
def test_each_refusal_names_the_variables_to_set(here: str, mode: str) -> None:
    said = refusal("h:1", here, mode)
    if mode == "token":
        assert "set RAY_AUTH_TOKEN to the one" in said
        assert "or RAY_AUTH_TOKEN_PATH to a file" in said
    elif here:
        assert f"RAY_AUTH_MODE is {mode or 'not set'}: set it to token" in said
        assert f"the token in {here}" in said
    else:
        assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the one" in said


# -- heads


@contextmanager
def head(folder: Path, **environment: str) -> Iterator[str]:
    """The address of one."""
    from ray._private.services import GCS_SERVER_EXECUTABLE

    port = free_port()
    command = [
        GCS_SERVER_EXECUTABLE, f"--gcs_server_port={port}", "--node-ip-address=127.0.0.1",
        f"--log_dir={folder}", f"--session-dir={folder}", "--session-name=session_x",
        f"--node-id={'0' * 56}", f"--config_list={b64encode(b'{}').decode()}",
        "--metrics-agent-port=-1",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        own = {**os.environ, **environment}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=own)
    try:
        wait_until(lambda: listens(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def with_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("head")
    with head(folder, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=GIVEN) as address:
        yield address


@pytest.fixture(scope="module")
def without_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with head(tmp_path_factory.mktemp("head"), RAY_AUTH_MODE="disabled") as address:
        yield address


LET_IN = "this machine is no node of that cluster: make it one with `ray start --address="
OF_NODES = (
    "RAY_AUTH_TOKEN to the one that its nodes were started with, or RAY_AUTH_TOKEN_PATH to a file"
    " with it"
)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({MODE: "token", TOKEN: GIVEN}, LET_IN),
        ({}, f"asks for a token, and there is none here: set RAY_AUTH_MODE=token, and {OF_NODES}"),
        (
            {TOKEN: GIVEN},
            "asks for a token, but RAY_AUTH_MODE is not set: set it to token, so that the token in"
            " RAY_AUTH_TOKEN is sent",
        ),
        (
            {MODE: "token", TOKEN: "0" * 32},
            f"refuses the token in RAY_AUTH_TOKEN: set {OF_NODES}",
        ),
        ({MODE: "token"}, "RAY_AUTH_MODE is token, but there is no token here: set RAY_AUTH_TOKEN"),
    ],
)
def test_a_head_with_a_token_lets_in_who_has_it_and_is_named_to_others_with_what_to_set(
    with_token: str,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    sentence: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as found:
        ray_cluster.connect(with_token)
    assert sentence in str(found.value)
    assert with_token in str(found.value)


def test_a_token_of_ones_home_is_sent_to_the_machines_own_cluster(
    with_token: str, home: Path
) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(GIVEN)
    with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE is not set: .*~/.ray/auth_token is sent"):
        ray_door.ask_head(with_token, local=False)
    with pytest.raises(ConfigError, match=LET_IN):
        ray_door.ask_head(with_token, local=True)


def test_a_head_that_asks_for_no_token_is_refused_where_one_is_set(
    without_token: str, with_token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray_door.check_token_wanted(without_token)
    monkeypatch.setenv(MODE, "token")
    monkeypatch.setenv(TOKEN, GIVEN)
    ray_door.check_token_wanted(with_token)
    sentence = f"RAY_AUTH_MODE is token, but the cluster at {without_token} asks for none"
    with pytest.raises(ConfigError, match=rf"{sentence}.* unset RAY_AUTH_MODE here to join it"):
        ray_door.check_token_wanted(without_token)


def test_a_node_that_starts_at_the_same_time_is_waited_for(
    without_token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([False, False, True])
    monkeypatch.setattr(ray_door, "NODE_S", 60.0)
    monkeypatch.setattr(ray_door, "LOOK_S", 0.0)
    monkeypatch.setattr(ray_door, "has_node_here", lambda _: next(looks))
    ray_door.ask_head(without_token, local=False)
    assert not list(looks)
