"""What keeps this process out of a Ray cluster, asked of its head before Ray joins it.

Ray itself tries for 20 s with a wrong token, ends the process where it is to send one and has none,
and waits for a minute on a machine that is no node. It joins a head that asks for no token also
where one is set here. Its functions block; `ray` must be installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from kvmig.core.errors import ConfigError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Ray's variables: whether calls have a token, the token, and a file with it."""
HOME_FILE = "~/.ray/auth_token"
"""The file in which Ray looks for a token without either."""
JOIN_S = 50.0
"""Longest wait for a cluster that is to be joined."""
NODE_S, LOOK_S = 10.0, 0.5
"""Longest wait for this machine's node, which may have started at the same time, and the pause
between two looks for it."""
OPEN_S = 20.0
"""Longest wait for the process that asks a head without a token."""
ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def within(limit_s: float, act: Callable[[], None]) -> None:
    """Run `act` in a thread; if it takes longer than `limit_s`, the thread is left behind.

    Raises TimeoutError, or what `act` raises.
    """
    ended: SimpleQueue[Exception | None] = SimpleQueue()

    def run() -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            ended.put(error)
        else:
            ended.put(None)

    threading.Thread(target=run, name="ray", daemon=True).start()
    try:
        error = ended.get(timeout=limit_s)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error


def ask_head(address: str, *, local: bool) -> None:
    """Raise ConfigError if its head refuses calls of this process, or if this
    machine is none of its nodes.

    address: HOST:PORT. local: the machine's own cluster, for which Ray sends a token that is here
    also where RAY_AUTH_MODE is not set.
    """
    from ray import _raylet
    from ray.exceptions import AuthenticationError, RpcError

    here = token_here(os.environ)
    if local and here and MODE not in os.environ:
        os.environ[MODE] = "token"
    raylet: Any = _raylet  # its types leave these out
    raylet.Config.initialize("")  # Ray may have read its variables before
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    if os.environ.get(MODE, "").lower() == "token" and not here:
        raise ConfigError(
            f"{MODE} is token, but there is no token here: set {TOKEN} to the one that the nodes"
            f" of {address} were started with, or {TOKEN_PATH} to a file with it; for a cluster"
            f" that asks for none, unset {MODE}"
        )
    try:
        head = raylet.GcsClient(address=address)
        until = time.monotonic() + NODE_S
        while not has_node_here(head):
            if time.monotonic() > until:
                raise ConfigError(
                    f"--ray is {address}, but this machine is no node of that cluster: make it one"
                    f" with `ray start --address={address}`"
                )
            time.sleep(LOOK_S)
    except AuthenticationError as error:
        raise ConfigError(refusal(address, here, os.environ.get(MODE, ""))) from error
    except RpcError as error:
        raise ConfigError(f"--ray is {address}, whose head does not answer: {error}") from error


def has_node_here(head: Any) -> bool:
    """Whether a node of the cluster is on this machine. head: Ray's client of it. Raises Ray's
    errors."""
    from ray._private import services
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    alive = head.get_all_node_info(timeout=JOIN_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE)
    return not {one.hex() for one in alive}.isdisjoint(services.find_node_ids())


def token_here(environment: Mapping[str, str]) -> str:
    """The place where this process has a token, as Ray looks for it; empty: it has none. Raises
    ConfigError for a file that can't be read or is empty."""
    if environment.get(TOKEN, "").strip():
        return TOKEN
    if named := environment.get(TOKEN_PATH, ""):
        try:
            found = Path(named).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{TOKEN_PATH} is {named}, which can't be read: {error}") from error
        if not found:
            raise ConfigError(f"{TOKEN_PATH} is {named}, which is empty, must hold a token")
        return TOKEN_PATH
    own = Path(HOME_FILE).expanduser()
    return HOME_FILE if own.is_file() and own.read_text().strip() else ""


def refusal(address: str, here: str, mode: str) -> str:
    """The message about a head that refuses this process. here: where its token is; mode:
    RAY_AUTH_MODE."""
    of_nodes = f"the one that its nodes were started with, or {TOKEN_PATH} to a file with it"
    if mode.lower() == "token":
        return f"--ray is {address}, which refuses the token in {here}: set {TOKEN} to {of_nodes}"
    if here:
        return (
            f"--ray is {address}, which asks for a token, but {MODE} is {mode or 'not set'}: set it"
            f" to token, so that the token in {here} is sent"
        )
    return (
        f"--ray is {address}, which asks for a token, and there is none here: set {MODE}=token, and"
        f" {TOKEN} to {of_nodes}"
    )


def check_token_wanted(address: str) -> None:
    """Raise ConfigError if a token is set here, but the head asks for none: all who reach it can
    run programs on the cluster, which the user doesn't expect. Raises TimeoutExpired.

    A process of its own asks: Ray would warn here that a call without a token was refused.
    """
    if os.environ.get(MODE, "").lower() != "token":
        return
    environment = {name: it for name, it in os.environ.items() if name not in (TOKEN, TOKEN_PATH)}
    done = subprocess.run(
        [sys.executable, "-c", ASK, address],
        env={**environment, MODE: "disabled"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=OPEN_S,
        check=False,
    )
    if done.returncode == 0:
        raise ConfigError(
            f"{MODE} is token, but the cluster at {address} asks for none, and takes orders from"
            f" all who reach it: start its nodes with {MODE}=token and the same {TOKEN} or"
            f" {TOKEN_PATH}, or unset {MODE} here to join it as it is"
        )
