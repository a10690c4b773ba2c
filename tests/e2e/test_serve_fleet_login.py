"""A fleet whose people log in at an identity provider: from the command to the first answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import ToyFleet, answer, ask, counted
from tests.support.provider_site import CLIENT, provider_site

pytestmark = [pytest.mark.server, pytest.mark.long]


def kvmig(fleet: ToyFleet, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as on another host, without a key."""
    command = [sys.executable, "-m", "kvmig", f"--url={fleet.url}", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SERVER_PATIENCE_S
    )


async def log_in_by_browser(fleet: ToyFleet) -> None:
    """To the page, and chat there."""
    async with httpx.AsyncClient(
        base_url=fleet.url, follow_redirects=True, timeout=SERVER_PATIENCE_S
    ) as browser:
        there = await browser.get("/ui/login/provider?next=/ui/playground")
        assert there.headers["refresh"] == "0; url=/ui/playground", there.text
        page = (await browser.get("/ui/playground")).text
        token = page.partition('name="csrf" value="')[2][:64]
        chat = {"model": "count", "max_tokens": 5, "messages": [{"role": "user", "content": "1"}]}
        answered = await browser.post(
            "/ui/v1/chat/completions", json=chat, headers={"x-csrf-token": token}
        )
        assert answered.json()["usage"]["completion_tokens"] == 5
        assert (await browser.get("/ui/users")).status_code == 403


async def test_a_person_logs_in_and_is_answered(tmp_path: Path) -> None:
    with provider_site() as site:
        flags = [
            f"--oidc-issuer={site.issuer}", f"--oidc-client-id={CLIENT}",
            "--oidc-admin-group=ops", "--oidc-user-group=staff",
        ]  # fmt: skip
        with ToyFleet(tmp_path, *flags) as fleet:
            fleet.add_toy("count")
            done = await asyncio.to_thread(kvmig, fleet, "login")
            assert done.returncode == 0, done.stderr
            async with fleet.client(done.stdout.strip()) as client:
                assert await answer(client, ask("count", 20)) == counted(20)
                assert (await client.get("/kvmig/v2/users")).status_code == 403
            await log_in_by_browser(fleet)
            site.person |= {"groups": ["ops"]}
            done = await asyncio.to_thread(kvmig, fleet, "login")
            async with fleet.client(done.stdout.strip()) as client:
                users = (await client.get("/kvmig/v2/users")).json()["data"]
            roles = {one["name"]: one["role"] for one in users}
            assert roles == {"admin": "admin", "bea": "admin"}
            site.person |= {"groups": ["other"]}
            done = await asyncio.to_thread(kvmig, fleet, "login")
            assert (done.returncode, done.stdout) == (1, "")
            assert "names no group that may log in to this fleet" in done.stderr
            async with fleet.client("none") as client:
                large = {"id_token": "x" * 100_000}
                assert (await client.post("/kvmig/v2/login", json=large)).status_code == 413
                assert (await client.get("/kvmig/v2/users")).status_code == 401
