"""A fleet of toys, and its clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from kvmig.engines.toy.script import ScriptFile, ToyScript
from kvmig_tools.fleet import FleetUp
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.waiting import wait_until

PATH = "/v1/completions"


class ToyFleet(FleetUp):
    """Whose models count on, and do what a script says."""

    def __init__(
        self, folder: Path, *flags: str, host: str = "127.0.0.1", enter: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, *flags, host=host, enter=enter)
        self.script = ScriptFile(str(folder / "script"))

    def add_toy(self, name: str, **more: Any) -> None:
        """Put one into the catalogue."""
        own = [f"--script={self.folder.parent / 'script'}", "--max-num-seqs=64"]
        flags = [*own, *more.pop("flags", [])]
        self.add({"name": name, "source": "path:/toy", "engine": "toy", "flags": flags, **more})

    def until_it_listens(self) -> None:
        """Wait for a server, also for the next one."""
        wait_until(self.listens)

    def listens_after(self, server: int) -> bool:
        """Whether the next server's API does. One that ends has no name any more, and still listens
        for a moment."""
        return self.processes("kvmig.fleet.server") not in ([], [server]) and self.listens()

    def hold(self, tokens: int | None) -> None:
        """Let no request get more output tokens; None: go on."""
        self.script.write(ToyScript() if tokens is None else ToyScript(hold=tokens))


def instances_by_socket(fleet: FleetUp) -> dict[str, list[dict[str, Any]]]:
    """Rows of the instances of each deployment, by the path of its socket."""
    found = {}
    for path in map(str, (fleet.folder / "run").glob("d-*.sock")):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path):
                continue  # of a deployment that ends; httpx leaves a refused socket open
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=path, verify=False), base_url="http://x"
        ) as it:
            found[path] = it.get("/kvmig/v1/instances").json()["data"]
    return found


def socket_of(fleet: FleetUp, model: str) -> str:
    """The path of the socket of a model's deployment."""
    every = instances_by_socket(fleet)
    return next(path for path, rows in every.items() if rows[0]["model"] == model)


def ended(pid: int) -> bool:
    """Whether a process is gone, or only its exit code is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def ask(model: str, tokens: int = 10, start: int = 17, **more: Any) -> dict[str, Any]:
    prompt = f"Count: {start:04} {start + 1:04}"
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


def counted(tokens: int, start: int = 17) -> str:
    """What comes after `ask`'s prompt."""
    return "".join(f" {number:04}" for number in range(start + 2, start + 3 + tokens))[:tokens]


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    found = await client.post(PATH, json=body)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


class Streamed:
    """A stream that is followed while it comes."""

    def __init__(self, fleet: ToyFleet, body: dict[str, Any], key: str | None = None) -> None:
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.task = asyncio.create_task(self._follow(fleet.client(key), body))

    async def _follow(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        body = {**body, "stream": True}
        async with client, client.stream("POST", PATH, json=body) as found:
            assert found.status_code == 200, await found.aread()
            async for line in found.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    self.error = chunk.get("error") or self.error
                    for choice in chunk.get("choices", []):
                        self.text += choice["text"]
        return self.text

    async def reach(self, tokens: int) -> None:
        async with asyncio.timeout(SERVER_PATIENCE_S):
            while len(self.text) < tokens:
                assert not self.task.done(), await self.task
                await asyncio.sleep(0.01)


async def hold_streams(
    fleet: ToyFleet, *bodies: dict[str, Any], key: str | None = None, tokens: int = 8
) -> list[Streamed]:
    """Streams that stand at so many tokens, until `fleet.hold(None)`."""
    fleet.hold(tokens)
    streams = [Streamed(fleet, body, key) for body in bodies]
    for stream in streams:
        await stream.reach(tokens)
    return streams
