"""Each example runs, and the toy engine conforms."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

import kvmig
from kvmig.core.errors import ConfigError, MigrationRefused
from kvmig.engines.base import EmittedTokens, Frame
from kvmig.engines.toy import factory
from tests.engines.test_conformance import ROOT, run_suite


def test_the_toy_engine_conforms() -> None:
    code, output = run_suite("--engine", "kvmig.engines.toy:factory")
    assert code == 0, output


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("examples.embedding", "committed"),
        ("examples.data_plane", "checksums agree"),
        ("examples.rollout", "round 2: 32 answers by counts-by-2"),
    ],
)
def test_an_example_runs(module: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_the_toy_engine_says_what_is_left_of_prompts_that_run() -> None:
    """100 tokens in blocks of 8, 64 of them a step."""
    engine = factory()
    engine.submit(1, "r", engine.encode_request(range(100), 5))
    left = []
    for _ in range(3):
        engine._batch.step()
        left.append(engine.load().prefill_blocks)
    assert left == [5, 0, 0]


def test_a_request_moves_without_an_event_loop_of_ones_own() -> None:
    engines = {"a": factory(), "b": factory()}
    tokens: list[int] = []
    ended, some = threading.Event(), threading.Event()

    def take(client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
        for one in engines["a"].decode_outputs(frames):
            tokens.extend(one.token_ids)
            some.set()
            if one.finish_reason:
                ended.set()

    with kvmig.SyncMigrator(engines) as migrator:
        for engine in engines.values():
            migrator.on_loop(
                lambda engine=engine: engine.connect(take, lambda *done: None, lambda error: None)  # type: ignore[misc]
            )
        payload = engines["a"].encode_request(range(50), 400)
        migrator.on_loop(lambda: engines["a"].submit(1, "r", payload))
        assert some.wait(20)
        report = migrator.migrate("r", "a", "b")
        assert report.state == "committed"
        assert report.downtime_ms is not None
        assert report.downtime_ms.first_token is None, "nobody told when it came"
        assert ended.wait(20)
        assert len(tokens) == 400
        for engine in engines.values():
            migrator.run(engine.close(5.0))


async def test_names_that_are_no_engines_are_refused() -> None:
    async with kvmig.Migrator({"a": factory(), "b": factory()}) as migrator:
        with pytest.raises(ConfigError, match="source is 'c', must be one of a, b"):
            await migrator.migrate("r", "c", "b")
        with pytest.raises(ConfigError, match="destination is 'd', must be one of a, b"):
            await migrator.migrate("r", "a", "d")
        with pytest.raises(ConfigError, match="another than the source"):
            await migrator.migrate("r", "a", "a")


async def test_a_stack_may_refuse_a_request_at_its_commit() -> None:
    engines = {"a": factory(), "b": factory()}

    def refuse(request_id: str, destination: str) -> None:
        raise MigrationRefused("incompatible", f"{destination} has no client for it")

    async with kvmig.Migrator(engines, on_commit=refuse) as migrator:
        for engine in engines.values():
            engine.connect(lambda *out: None, lambda *done: None, lambda error: None)
        engines["a"].submit(1, "r", engines["a"].encode_request(range(50), 400))
        while not await engines["a"].requests():  # noqa: ASYNC110
            await asyncio.sleep(0)
        report = await migrator.migrate("r", "a", "b")
        assert (report.state, report.reason) == ("aborted", "incompatible")
        assert [one.request_id for one in await engines["a"].requests()] == ["r"]
        assert await engines["b"].requests() == []
        await asyncio.gather(*(engine.close(5.0) for engine in engines.values()))
