"""`kvmig up --ray` on a Ray cluster with Ray's own TLS, which is what encrypts orders to nodes, the
clusters' secrets and models' files. The tests are in order.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvmig.process.sockets import free_port
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.certificates import Authority
from tests.support.fleets import ToyFleet, ask, counted, hold_streams
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from ray._private import services

from tests.e2e.test_fleet_workers import order, places, workers
from tests.support.ray_nodes import END_S, RAYS_OWN, STORE_BYTES, UP

pytestmark = [pytest.mark.server, pytest.mark.long]

NAMES = ("left", "right")
STREAMS, TOKENS, HELD = 6, 60, 10


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ray's variables, the same for all that belong to the cluster."""
    folder, authority = tmp_path_factory.mktemp("certificates"), Authority.make()
    own = services.resolve_ip_for_localhost("127.0.0.1")
    files = authority.write(folder, host=own)
    return {
        "RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": files.cert, "RAY_TLS_SERVER_KEY": files.key,
        "RAY_TLS_CA_CERT": authority.write_own(folder),
    }  # fmt: skip


@pytest.fixture(scope="module")
def address(tls: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a cluster by `ray start`: a process reads these variables once, when it imports Ray."""
    own, port = services.resolve_ip_for_localhost("127.0.0.1"), free_port()
    logs = tmp_path_factory.mktemp("ray")
    head = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false",
            "--disable-usage-stats", f"--node-ip-address={own}"]  # fmt: skip
    words = {"head": head, **{one: [f"--address={own}:{port}", "--num-cpus=2"] for one in NAMES}}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        for name, value in {**RAYS_OWN, **tls}.items():
            patched.setenv(name, value)
        for name, flags in words.items():
            log = logs / name
            command = [
                str(Path(sys.executable).with_name("ray")), "start", "--block",
                f"--node-name={name}", f"--object-store-memory={STORE_BYTES}", *flags,
            ]  # fmt: skip
            with log.open("wb") as file:
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            stack.callback(process.wait, END_S)
            stack.callback(process.terminate)
            wait_until(lambda log=log: UP in log.read_text(), within_s=SERVER_PATIENCE_S)  # type: ignore[misc]
        yield f"{own}:{port}"


@pytest.fixture(scope="module")
def fleet(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    with ToyFleet(tmp_path_factory.mktemp("fleet"), f"--ray={address}", "--threads=1") as made:
        wait_until(lambda: all(workers(made).get(one, {}).get("state") == "ready" for one in NAMES))
        yield made


async def test_a_worker_is_drained_under_streams_over_rays_tls(fleet: ToyFleet) -> None:
    fleet.add_toy("a", instances={"min": 1, "max": 2})
    fleet.until("models/a", state="serving", serving=1)
    bodies = [ask("a", TOKENS, start=100 * number) for number in range(STREAMS)]
    streams = await hold_streams(fleet, *bodies, tokens=HELD)
    (before,) = places(fleet)
    order(fleet, before, "drain")
    await until_yes(lambda: workers(fleet)[before]["drain"]["state"] == "drained")
    fleet.hold(None)
    texts = [await one.task for one in streams]
    assert texts == [counted(TOKENS, 100 * number) for number in range(STREAMS)]
    assert before not in places(fleet)


def test_who_has_no_certificate_is_refused_before_anything_starts(
    address: str, tls: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvmig", f"--data={tmp_path / 'data'}", "up", "--ray", address]
    plain = {name: value for name, value in os.environ.items() if name not in tls}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SERVER_PATIENCE_S, check=False, env=plain
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"kvmig: --ray is {address}")
    assert not (tmp_path / "data").exists()
