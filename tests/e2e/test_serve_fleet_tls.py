"""A fleet with a certificate: the command on its own host, and refusals before anything starts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvmig.core.errors import StartupError
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.certificates import Authority
from tests.support.fleets import ToyFleet, answer, ask, counted

pytestmark = pytest.mark.server

EXPIRY = "kvmig_proxy_certificate_expiry_timestamp_seconds"


def kvmig(fleet: ToyFleet, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvmig", f"--data={fleet.folder}", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SERVER_PATIENCE_S
    )


@pytest.mark.long
async def test_a_fleet_with_a_certificate_serves_https_alone(tmp_path: Path) -> None:
    authority = Authority.make()
    files = authority.write(tmp_path)
    with ToyFleet(tmp_path, f"--tls-cert={files.cert}", f"--tls-key={files.key}") as fleet:
        fleet.add_toy("count")
        bearer = {"authorization": f"Bearer {fleet.key}"}
        async with httpx.AsyncClient(
            base_url=fleet.url,
            headers=bearer,
            timeout=SERVER_PATIENCE_S,
            verify=authority.trusting(),
        ) as client:
            assert await answer(client, ask("count", 20)) == counted(20)
            async with asyncio.timeout(30):
                while EXPIRY not in (await client.get("/metrics")).text:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            plain = fleet.url.replace("https", "http")
            with pytest.raises(httpx.TransportError):
                await client.get(f"{plain}/health")
        said = kvmig(fleet, "chat", "count", "7", "--max-tokens", "4")
        assert (said.returncode, said.stderr) == (0, "")
        assert said.stdout.strip()
        status = fleet.get("status")
    assert (status["address"], status["certificate"]) == (fleet.url, files.cert)


def test_a_fleet_without_its_certificates_key_does_not_begin(tmp_path: Path) -> None:
    files = Authority.make().write(tmp_path)
    Path(files.key).unlink()
    fleet = ToyFleet(tmp_path, f"--tls-cert={files.cert}", f"--tls-key={files.key}")
    with pytest.raises(StartupError, match=r"--tls-key is '.*', must be a file that can be read"):
        fleet.start()
    assert fleet.process is not None
    assert fleet.process.wait(10) == 2
    assert not fleet.folder.exists()
