"""A process that runs a command as a deployment does, with toy servers of no engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from kvmig.accounts.usage import UsageRecord, UsageSpool
from kvmig.command.launch import CommandLaunch, encode_launch
from kvmig.core.order_fence import TOKEN_HEADER
from tests.support.waiting import until, wait_until

TOY = (sys.executable, "-m", "tests.support.toy_openai", "--name", "{name}", "--script")
ROOT = Path(__file__).resolve().parents[2]
COUNTS = "x-kvmig-account"
END_S = 30.0


def toy_command(script: Path, *more: str, listens: str = "--port={port}") -> tuple[str, ...]:
    """The template of a toy server that does what the folder `script` says."""
    return (*TOY, str(script), listens, *more)


class ToyScripts:
    """What all toy servers of a test do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def hold(self, tokens: int | None) -> None:
        """Let no answer get more tokens; None: go on."""
        self.set("hold", None if tokens is None else str(tokens))

    def set(self, name: str, text: str | None = "") -> None:
        """Write one of its files; None: remove it."""
        file = self.folder / name
        if text is None:
            file.unlink(missing_ok=True)
            return
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.rename(file)

    def asked(self) -> dict[int, list[Any]]:
        """Bodies that each process got, JSON ones only."""
        found = {}
        for file in self.folder.glob("asked-*"):
            lines = file.read_bytes().splitlines()
            found[int(file.name.split("-")[1])] = [
                json.loads(one) for one in lines if one.startswith(b"{")
            ]
        return found


class CommandSite:
    """`python -m kvmig.command`, until the end of the block."""

    def __init__(
        self, folder: Path, *flags: str, listens: str = "--port={port}", **more: Any
    ) -> None:
        self.script = ToyScripts(folder / "script")
        self.folder = folder
        self.launch = CommandLaunch(
            model="toy",
            uds=str(folder / "d.sock"),
            spool=str(folder / "spool"),
            quotas=str(folder / "quotas.sock"),
            **{
                "command": toy_command(self.script.folder, *flags, listens=listens),
                "source": str(folder),
                "most": 8,
                "shutdown_timeout_s": 5.0,
                "start_timeout_s": 30.0,
                **more,
            },
        )
        self.log = folder / "log"
        self._heard, self._beats = os.pipe()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; `until_serving` waits."""
        words = [encode_launch(self.launch), "--heartbeat-descriptor", str(self._beats)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvmig.command", *words],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[self._beats], cwd=ROOT,
            )  # fmt: skip

    def __enter__(self) -> Self:
        self.start()
        try:
            wait_until(
                lambda: self._serving() >= self.launch.instances or self.over,
                within_s=self.launch.start_timeout_s,
            )
            assert not self.over, self.log.read_text()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.log.read_text()[-4000:])
        self.script.hold(None)
        self.end()
        for one in (self._heard, self._beats):
            os.close(one)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        assert self.process is not None
        return self.process.poll() is not None

    def end(self) -> int:
        """End it as init does; its exit code."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(END_S)

    def ask(self, method: str, path: str, body: Any = None, token: str = "") -> httpx.Response:
        """Of its admin API. token: of a fleet's server; empty: none."""
        transport = httpx.HTTPTransport(uds=self.launch.uds, verify=False)
        with httpx.Client(transport=transport, base_url="http://x", timeout=30) as client:
            headers = {TOKEN_HEADER: token} if token else {}
            return client.request(method, path, json=body, headers=headers)

    def client(self, **headers: str) -> httpx.AsyncClient:
        """As the door speaks, for the key `k`."""
        transport = httpx.AsyncHTTPTransport(uds=self.launch.uds, verify=False)
        return httpx.AsyncClient(
            transport=transport, base_url="http://x", timeout=60, headers={COUNTS: "k", **headers}
        )

    def rows(self) -> list[dict[str, Any]]:
        """Of its instances."""
        rows: list[dict[str, Any]] = self.ask("GET", "/kvmig/v1/instances").json()["data"]
        return rows

    def _serving(self) -> int:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(self.launch.uds):
                return 0  # httpx leaves a refused socket open
        return sum(one["state"] == "serving" for one in self.rows())

    async def until_states(self, *states: str) -> None:
        """Wait until its instances are so, in the order of their names."""
        await until(lambda: [one["state"] for one in self.rows()] == list(states), pause_s=0.02)

    def records(self) -> list[UsageRecord]:
        """What it has written down."""
        return [
            one
            for path in Path(self.launch.spool).glob("*.sqlite")
            for one in UsageSpool(path).read()
        ]

    async def ended_records(self, count: int) -> list[UsageRecord]:
        """The same, once so many calls have ended."""
        await until(
            lambda: sum(one.ended is not None for one in self.records()) >= count, pause_s=0.05
        )
        return self.records()


class FollowedStream:
    """What a client gets of a stream, as lines."""

    def __init__(self) -> None:
        self.text = ""
        self.events: list[Any] = []
        self.done = False

    @property
    def error(self) -> str:
        """The message of the error that it ended with; empty: there is none."""
        return next((one["error"]["message"] for one in self.events if "error" in one), "")

    @property
    def usage(self) -> list[Any]:
        """Every usage that was in it."""
        return [one["usage"] for one in self.events if one.get("usage")]

    async def follow(self, client: httpx.AsyncClient, path: str, body: Any) -> Self:
        """Return at its end."""
        async with client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                self.done = self.done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.events.append(event)
                    for one in event.get("choices", []):
                        self.text += one.get("text") or one.get("delta", {}).get("content", "")
        return self


def text_of(tokens: int) -> str:
    """What a toy answers."""
    return "".join(f" {number:04}" for number in range(tokens))
