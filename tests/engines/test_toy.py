"""The toy engine: it counts on where its KV cache is right, and does what its script says."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.core.errors import ConfigError
from kvmig.engines.registry import kind_of
from kvmig.engines.toy.core import ToyBatch, ToyCache, ToyRequest, compute, sample
from kvmig.engines.toy.engine import ToyEngine
from kvmig.engines.toy.script import ScriptFile, ToyScript
from kvmig.engines.transformers.payload import SubmittedRequest
from tests.support.waiting import until


def told(prompt: bytes, outputs: int, seed: int | None = None) -> bytes:
    """What comes after a prompt."""
    tokens = prompt
    for _ in range(outputs):
        tokens += bytes([sample(compute(tokens, 0), tokens, seed)])
    return tokens.removeprefix(prompt)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        (b"Count: 0017 0018", b" 0019 0020"),
        (b"Count: 9998 9999", b" 0000 0001"),
        (b"Count: 0017 00", b"18 0019 0020"),
        (b"Count from 0042\n", b"0042 0043 0044"),
        (b"1", b"000 1001 1002"),
    ],
)
def test_it_counts_on(prompt: bytes, wanted: bytes) -> None:
    assert told(prompt, len(wanted)) == wanted


def test_what_is_drawn_depends_on_the_seed() -> None:
    answers = {told(b"Count: 0017 0018", 50, seed) for seed in range(5)}
    assert len(answers) == 5
    assert told(b"Count: 0017 0018", 50, 3) in answers


@pytest.mark.parametrize("wrong", [0, 7, 15])
def test_one_wrong_byte_of_its_kv_cache_changes_the_answer(wrong: int) -> None:
    prompt = b"Count: 0017 0018"
    cache = compute(prompt, 0)
    cache[wrong] ^= 1
    assert sample(cache, prompt, None) == ord("?")


def test_two_blocks_that_are_mixed_up_change_the_answer() -> None:
    prompt = b"0000 0000 0000 0000 0000"  # alike but for their places
    cache = compute(prompt, 0)
    cache[[5, 10]] = cache[[10, 5]]
    assert sample(cache, prompt, None) == ord("?")


def entered(
    batch: ToyBatch, *priorities: int, prompt: int = 8, tokens: int = 8
) -> list[ToyRequest]:
    """Requests of so many tokens, in this order."""
    made = []
    for number, priority in enumerate(priorities):
        asked = SubmittedRequest(
            prompt_token_ids=[49] * prompt, max_tokens=tokens, priority=priority
        )
        made.append(ToyRequest(f"r{number}", 1, asked, bytearray(asked.prompt_token_ids)))
        batch.enter(made[-1])
    return made


def test_those_that_wait_begin_by_priority_then_in_order() -> None:
    batch = ToyBatch(ToyCache(100, 8), 2)
    first, second, third, fourth = entered(batch, 0, 0, -1, 0)
    batch.step()
    assert batch.running == [third, first]
    assert batch.waiting == [second, fourth]


def test_the_last_of_the_least_priority_gives_way() -> None:
    batch = ToyBatch(ToyCache(4, 8), 4)
    high, normal = entered(batch, -1, 0, tokens=20)
    while high.num_outputs < 10:
        batch.step()
    assert (batch.running, batch.waiting) == ([high], [normal])
    assert (batch.preempted, batch.below) == ({0: 1}, {0: 1})
    while normal.num_outputs < 20:
        batch.step()
    assert bytes(normal.tokens) == bytes(high.tokens)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[ScriptFile]:
    yield ScriptFile(str(tmp_path / "script"))
    # Each is written beside it and then takes its place.
    assert len(list(tmp_path.iterdir())) <= 1


def test_a_script_is_read_again_when_it_has_changed(script: ScriptFile, tmp_path: Path) -> None:
    assert script.read() == ToyScript()
    for hold in (1, 2, 3):
        script.write(ToyScript(hold=hold))
        assert script.read() == ToyScript(hold=hold)
    (tmp_path / "script").unlink()
    assert script.read() == ToyScript()


def test_only_the_first_that_comes_to_it_hangs(script: ScriptFile) -> None:
    script.write(ToyScript(hang_at=7, hang_s=3))
    assert script.fault([5, 6]) == 0
    assert script.fault([6, 7]) == 3
    assert script.fault([6, 7]) == 0


def test_a_crash_kills_the_process(script: ScriptFile, tmp_path: Path) -> None:
    script.write(ToyScript(crash_at=7))
    code = (
        "from kvmig.engines.toy.script import ScriptFile\n"
        f"script = ScriptFile({str(tmp_path / 'script')!r})\n"
        "script.fault([6]); print('alive', flush=True); script.fault([7]); print('still')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "alive\n")


async def test_held_requests_go_on_when_they_are_let(script: ScriptFile) -> None:
    script.write(ToyScript(hold=5))
    engine = ToyEngine(script=script)
    came: list[int] = []
    engine.connect(
        lambda client, emitted, frames: came.extend(engine.decode_outputs(frames)[0].token_ids),
        lambda *done: None,
        lambda error: None,
    )
    engine.submit(1, "r", engine.encode_request(b"Count: 0017 0018", 10))
    await until(lambda: len(came) >= 5)
    await asyncio.sleep(0.05)
    assert bytes(came) == b" 0019"
    script.write(ToyScript())
    await until(lambda: len(came) >= 10)
    assert bytes(came) == b" 0019 0020"
    await engine.close(5)


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--block-size is 0, must be more than 0"):
        kind_of("toy").parse(["toy", "--block-size=0"])


def test_its_start_imports_nothing_of_a_real_engine() -> None:
    code = (
        "import sys\n"
        "from kvmig.engines.registry import kind_of\n"
        "import kvmig.serve, kvmig.launcher.llumlet_main, kvmig.frontend.app\n"
        "import kvmig.frontend.openai.token_server, kvmig.engines.toy.kind\n"
        "kind = kind_of('toy'); kind.prepare(); kind.load(); kind.make(['toy'], 0)\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", done.stderr
