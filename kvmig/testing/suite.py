"""Two engines of one factory, the requests on them, and what must be true after each test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Concatenate, ParamSpec

from kvmig.core.config import MigrationConfig
from kvmig.engines.base import EmittedTokens, Frame
from kvmig.kvtransfer.report import MigrationReport
from kvmig.migrator import Migrator
from kvmig.testing.interposed import InterposedEngine, nothing
from kvmig.testing.subject import EngineUnderTest, Factory

TIMEOUT_S = 60.0
"""Time without a token or a migration's end after which a test counts as hung."""
LIMIT_S = 540.0
"""Limit of one test in any case."""
CLIENT = 1
QUICKER = ("finished", "unknown_request", "started")
"""Why a migration was aborted whose request was quicker."""
ATTEMPTS = 5

P = ParamSpec("P")


@dataclass
class OutputLog:
    """The outputs of one request, from all engines, in order."""

    token_ids: list[int] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    """Which one put each token out."""
    finish_reason: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class ConformanceSuite:
    """Engines "a" and "b" on an event loop that all tests share."""

    def __init__(self, factory: Factory) -> None:
        """Makes both engines, which may take its time."""
        self._runner = asyncio.Runner()
        self._heard: dict[str, OutputLog] = {}
        self._ids = itertools.count(1)
        self._prompts = itertools.count(100, 37)
        self.exits: list[BaseException | None] = []
        self._testing: asyncio.Task[None] | None = None
        self._silence: asyncio.Timeout | None = None
        self._end = 0.0
        self.under_test: dict[str, EngineUnderTest] = {}
        try:
            for name in "ab":
                self.under_test[name] = factory()
            self.engines = {n: InterposedEngine(e) for n, e in self.under_test.items()}
            self._runner.run(self._start())
        except BaseException:
            self._runner.close()
            raise

    async def _start(self) -> None:
        block_bytes = max(engine.layout.block_bytes for engine in self.engines.values())
        config = MigrationConfig(
            transport="tcp",
            chunk_bytes=2 * block_bytes,
            reply_timeout_ms=TIMEOUT_S * 500,
            lease_ms=TIMEOUT_S * 1000,
        )
        self._migrator = Migrator(self.engines, config, on_commit=self._assign, close_timeout_s=0.1)
        self._used = {name: engine.load().used_blocks for name, engine in self.engines.items()}
        for name, engine in self.engines.items():
            heard = self._migrator.tap(name, partial(self._take, name))
            engine.connect(heard, lambda *done: None, self._exited)
            await engine.warm_up()

    def close(self) -> None:
        """Close both engines."""

        async def close() -> None:
            await self._migrator.close()
            await asyncio.gather(*(engine.close(TIMEOUT_S) for engine in self.engines.values()))

        try:
            self._runner.run(asyncio.wait_for(close(), TIMEOUT_S))
        finally:
            self._runner.close()

    # -- a test

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        """Run a test, then check that it left nothing."""

        async def run() -> None:
            self._testing = asyncio.current_task()
            try:
                async with asyncio.timeout(TIMEOUT_S) as self._silence:
                    self._end = asyncio.get_running_loop().time() + LIMIT_S
                    await test()
                    await self._settle()
            except asyncio.CancelledError:
                if not self.exits:
                    raise
                raise AssertionError(f"an engine has ended: {self.exits}") from self.exits[0]
            finally:
                self._testing = self._silence = None
                for engine in self.engines.values():
                    engine.before = nothing
                    engine.abort(list(self._heard))
                    engine.violations.clear()

        self._runner.run(run())

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt of `num_tokens` new tokens: no prefix of it is cached anywhere."""
        text = " ".join(str(n) for n in itertools.islice(itertools.count(next(self._prompts)), 400))
        return list(text.encode() * (num_tokens // len(text) + 1))[:num_tokens]

    def blocks(self, count: float) -> int:
        """Tokens in `count` blocks."""
        return int(count * self.engines["a"].layout.block_tokens)

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        seed: int | None = None,
        known: Sequence[int] = (),
    ) -> str:
        """Run a new request on an engine, after `known` output tokens; its id."""
        request_id = f"request-{next(self._ids)}"
        payload = self.under_test[name].encode_request(prompt, max_tokens, seed)
        self._heard[request_id] = OutputLog()
        self.engines[name].submit(CLIENT, request_id, payload, known)
        return request_id

    async def begin(
        self, prompt: Sequence[int], max_tokens: int, tokens: int, seed: int | None = None
    ) -> str:
        """Run a new request on "a" until it has `tokens` output tokens; its id."""
        request_id = self.submit("a", prompt, max_tokens, seed)
        await self.reach(request_id, tokens)
        return request_id

    async def undisturbed(
        self, prompt: Sequence[int], max_tokens: int, seed: int | None = None
    ) -> list[int]:
        """What a request gets that stays on "a"."""
        return await self.finish(self.submit("a", prompt, max_tokens, seed))

    async def reach(self, request_id: str, tokens: int) -> None:
        """Wait until the request has that many output tokens."""
        heard = self._heard[request_id]
        while len(heard.token_ids) < tokens and not heard.finish_reason:
            heard.changed.clear()
            await heard.changed.wait()

    async def finish(self, request_id: str) -> list[int]:
        """The tokens of a request, once it has ended."""
        await self.reach(request_id, 1 << 60)
        heard = self._heard[request_id]
        assert heard.finish_reason != "error", f"{request_id} ended with an error"
        return heard.token_ids

    def has_ended(self, request_id: str) -> bool:
        """Whether the request has put out its last token."""
        return bool(self._heard[request_id].finish_reason)

    def came_from(self, request_id: str) -> list[str]:
        """Which engine put out each token."""
        return self._heard[request_id].engines

    async def move(
        self, request_id: str, source: str = "a", to: str = "b", *, after_prompt: bool = False
    ) -> MigrationReport:
        """Move a request; after_prompt: not before its prompt is computed."""
        report = await self._migrator.migrate(request_id, source, to, after_prompt=after_prompt)
        self._go_on()
        return report

    async def begun(self, request_id: str, name: str = "a") -> None:
        """Wait until an engine has begun to compute the request."""
        waits = True
        while waits:
            listed = await self.engines[name].requests()
            waits = any(one.request_id == request_id and one.state == "waiting" for one in listed)
            await asyncio.sleep(0)  # engines that answer at once make their steps on this loop

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what an engine says of itself in its own time."""
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def abort(self, request_id: str) -> None:
        """Abort as the request's client, on any engine."""
        for engine in self.engines.values():
            engine.abort([request_id])
        self._migrator.cancel(request_id)

    # -- what the engines say

    def _go_on(self) -> None:
        """Start the time limit of silence again, since something has come."""
        if self._silence is not None and not self._silence.expired():
            now = asyncio.get_running_loop().time()
            self._silence.reschedule(min(now + TIMEOUT_S, self._end))

    def _exited(self, error: BaseException | None) -> None:
        self.exits.append(error)
        if self._testing is not None:
            self._testing.cancel()

    def _assign(self, request_id: str, destination: str) -> None:
        self.engines[destination].assign(request_id, CLIENT)

    def _take(
        self, name: str, client: int, emitted: list[EmittedTokens], frames: list[Frame]
    ) -> None:
        if client != CLIENT:
            return
        self._go_on()
        for one in self.under_test[name].decode_outputs(frames):
            heard = self._heard.get(one.request_id)
            if heard is None:
                continue
            assert not heard.finish_reason, f"{one.request_id} went on after its end"
            heard.token_ids += one.token_ids
            heard.engines += [name] * len(one.token_ids)
            heard.finish_reason = one.finish_reason
            heard.changed.set()

    async def _settle(self) -> None:
        """Check that no request, block, reservation or buffer is held, and no rule was broken."""
        left: list[str] = ["?"]
        for _ in range(1000):
            left = [*self._migrator.held()]
            left += await self._left()
            if not left:
                break
            await asyncio.sleep(0.01)
        assert not left, f"left behind: {left}"
        for name, engine in self.engines.items():
            assert not engine.violations, f"{name} broke rules: {engine.violations}"
        assert not self.exits, f"an engine has ended: {self.exits}"

    async def _left(self) -> list[str]:
        left: list[str] = []
        for name, engine in self.engines.items():
            left += [f"{name}: {one}" for one in await engine.requests()]
            load = engine.load()
            if load.used_blocks != self._used[name]:
                left.append(f"{name}: {load.used_blocks} blocks")
            if load.running or load.waiting:
                left.append(f"{name}: {load}")
        return left


def scenario(
    test: Callable[Concatenate[ConformanceSuite, P], Awaitable[None]],
) -> Callable[..., None]:
    """Make a coroutine a test that runs on the suite's event loop, by `ConformanceSuite.run`."""

    @wraps(test)
    def run(suite: ConformanceSuite, *args: P.args, **kwargs: P.kwargs) -> None:
        suite.run(lambda: test(suite, *args, **kwargs))

    return run


def until_moved(
    test: Callable[Concatenate[ConformanceSuite, P], Awaitable[MigrationReport]],
) -> Callable[Concatenate[ConformanceSuite, P], Awaitable[None]]:
    """Make a scenario try again with a new request while they end before they can move.

    Which requests do on a busy machine: a test can't know how far one gets meanwhile.
    """

    @wraps(test)
    async def attempt(suite: ConformanceSuite, /, *args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(ATTEMPTS):
            report = await test(suite, *args, **kwargs)
            if report.state == "committed":
                return
            assert report.reason in QUICKER, (report.reason, report.detail)
        raise AssertionError(f"{ATTEMPTS} requests ended before they could move")

    return attempt
