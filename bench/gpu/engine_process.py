"""One transformers engine in a process of its own, and what its peer and `migration` ask of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from kvmig.core.config import MigrationConfig, Transport
from kvmig.core.errors import KvmigError, TransportError
from kvmig.engines.base import EmittedTokens, ServingEngine
from kvmig.engines.transformers import factory
from kvmig.engines.transformers.payload import StepOutput, SubmittedRequest, decode, encode
from kvmig.kvtransfer.context import LlumletPort
from kvmig.kvtransfer.messages import PeerMessage
from kvmig.kvtransfer.migrations import MigrationSessions
from kvmig.kvtransfer.transports.select import TransportSite, open_staging
from kvmig.rpc.codec import Frame, MessageCodec
from kvmig.rpc.messages import RpcMessage

CLIENT = 1
LIVE, BLOCKING = "live", "blocking"
END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Of both engines alike."""

    device: str
    dtype: str
    num_blocks: int
    max_batch_tokens: int
    transport: Transport
    chunk_bytes: int
    model: str = ""
    """Folder with a configuration: weights are drawn."""


@dataclass
class Came:
    """What one request got here: [n] token ids, log-probabilities, and when, monotonic seconds."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""


def run(name: str, setting: Setting, control: Connection, peer: Connection) -> None:
    """Serve until `control` is closed or says None."""
    if setting.device == "cpu":
        torch.set_num_threads(1)
    asyncio.run(_serve(name, setting, control, peer))


async def _serve(name: str, setting: Setting, control: Connection, peer: Connection) -> None:
    try:
        made = EngineProcess(name, setting, peer)
    except (KvmigError, RuntimeError) as error:
        control.send((False, f"{type(error).__name__}: {error}"))
        return
    try:
        await made.warm_up()
        control.send((True, "ready"))
        while (call := await asyncio.to_thread(_received, control)) is not None:
            method, arguments = call
            try:
                answer = True, await getattr(made, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - raised by whoever has called
                answer = False, f"{type(error).__name__}: {error}"
            control.send(answer)
    finally:
        await made.close()


def _received(control: Connection) -> Any:
    try:
        return control.recv()
    except EOFError:
        return None


class _Way(LlumletPort):
    """The pipe to the other process, and the engine that runs what comes."""

    def __init__(self, engine: ServingEngine, peer: Connection, mode: str) -> None:
        self._engine = engine
        self._peer = peer
        self._mode = mode
        self._codec = MessageCodec(PeerMessage)

    def send_to(self, endpoint: str, message: RpcMessage, payload: Sequence[Frame] = ()) -> None:
        self._send(False, message, payload)

    def reply(self, sender: bytes, message: RpcMessage) -> None:
        self._send(True, message, ())

    def _send(self, to_source: bool, message: RpcMessage, payload: Sequence[Frame]) -> None:
        frames = [bytes(frame) for frame in self._codec.encode(message, payload)]
        self._peer.send((self._mode, to_source, frames))

    async def resolve(self, mid: str, request_id: str, epoch: int, destination: str) -> bool:
        raise TransportError("nobody arbitrates here")

    def on_commit(self, request_id: str, epoch: int, output_tokens: int, gateway: str) -> None:
        self._engine.assign(request_id, CLIENT)


class EngineProcess:
    """Messages of migrations go to the other process by a pipe, blocks by the transport."""

    def __init__(self, name: str, setting: Setting, peer: Connection) -> None:
        """Raises KvmigError."""
        self._peer, self._other = peer, {"a": "b", "b": "a"}[name]
        self._codec = MessageCodec(PeerMessage)
        self._came: dict[str, Came] = {}
        self._changed = asyncio.Event()
        self._died = ""
        self.engine = factory(
            model=setting.model,
            random_weights=True,
            dtype=setting.dtype,
            device=setting.device,
            num_blocks=setting.num_blocks,
            max_batch_tokens=setting.max_batch_tokens,
            share_prefixes=False,  # else nothing of a prompt moves a second time
        )
        loop = asyncio.get_running_loop()
        self.engine.connect(self._take, lambda *done: None, self._ended)
        config = MigrationConfig(
            transport=setting.transport,
            chunk_bytes=setting.chunk_bytes,
            reply_timeout_ms=20_000,
            lease_ms=60_000,
        )
        self._stagings = open_staging(
            *(config.transport, "bench", name, config.staging_buffers, setting.chunk_bytes),
            TransportSite(gpu=self.engine.layout.gpu),
        )
        self._migrations = {
            LIVE: MigrationSessions(
                name, self.engine, config, self._stagings, _Way(self.engine, peer, LIVE)
            ),
            BLOCKING: MigrationSessions(
                name,
                self.engine,
                msgspec.structs.replace(config, max_stages=0),
                self._stagings,
                _Way(self.engine, peer, BLOCKING),
            ),
        }
        loop.add_reader(peer.fileno(), self._hear)

    async def warm_up(self) -> None:
        """What is done once is done then."""
        await self.engine.warm_up()
        await self._migrations[LIVE].get_ready()

    # -- calls

    async def submit(
        self, request_id: str, prompt: list[int], max_tokens: int, known: Sequence[int] = ()
    ) -> float:
        """When that was, as of this host's monotonic clock."""
        self._came[request_id] = Came()
        request = SubmittedRequest(prompt_token_ids=prompt, max_tokens=max_tokens, logprobs=0)
        self.engine.submit(CLIENT, request_id, [encode(request)], known)
        return time.monotonic()

    async def wait(self, request_id: str, tokens: int, timeout_s: float) -> Came:
        """Until it has so many tokens from here, or has ended. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                came = self._came.setdefault(request_id, Came())
                if self._died or came.error:
                    raise RuntimeError(self._died or came.error)
                if len(came.tokens) >= tokens or came.finish_reason:
                    return came
                self._changed.clear()
                await self._changed.wait()

    async def migrate(self, request_id: str, destination: str, mode: str) -> dict[str, Any]:
        """The report, and when it `began`."""
        began = time.monotonic()
        report = await self._migrations[mode].migrate(request_id, destination, destination)
        return {**msgspec.to_builtins(report), "began": began}

    async def clear(self) -> None:
        """Forget all that came; returns when nothing is left here, of anybody."""
        self.engine.abort([*self._came])
        async with asyncio.timeout(END_TIMEOUT_S):
            while await self.engine.requests() or self.engine.load().used_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        self._came.clear()

    async def close(self) -> None:
        """Free all of it."""
        asyncio.get_running_loop().remove_reader(self._peer.fileno())
        for migrations in self._migrations.values():
            await migrations.close(END_TIMEOUT_S)
        for staging in self._stagings.values():
            staging.close()
        await self.engine.close(END_TIMEOUT_S)

    # -- on the event loop

    def _hear(self) -> None:
        try:
            while self._peer.poll():
                mode, to_source, frames = self._peer.recv()
                message, payload = self._codec.decode([memoryview(frame) for frame in frames])
                if to_source:
                    self._migrations[mode].receive_reply(self._other, message)
                else:
                    self._migrations[mode].receive(b"", message, payload)
        except (EOFError, OSError) as error:
            asyncio.get_running_loop().remove_reader(self._peer.fileno())
            self._ended(error)

    def _take(self, client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
        now = time.monotonic()
        for output in decode(bytes(frames[0]), list[StepOutput]):
            for migrations in self._migrations.values():
                migrations.stepped(output.request_id, len(output.token_ids))
            came = self._came.setdefault(output.request_id, Came())
            came.tokens += output.token_ids
            came.logprobs += [one.value for one in output.logprobs]
            came.times += [now] * len(output.token_ids)
            came.finish_reason, came.error = output.finish_reason, output.error
        self._changed.set()

    def _ended(self, error: BaseException | None) -> None:
        self._died = f"the engine has ended: {error!r}"
        self._changed.set()
