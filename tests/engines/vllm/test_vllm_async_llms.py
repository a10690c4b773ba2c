"""Two of vLLM's AsyncLLM in one process, whose requests move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import pytest

from kvmig.core.errors import ConfigError
from kvmig.kvtransfer.report import MigrationReport
from kvmig.models import BUNDLED
from tests.support.environment import environment
from tests.support.vllm_side import ENVIRONMENT

if TYPE_CHECKING:
    from examples.async_llms import MovableLLMs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.filterwarnings(  # vLLM looks at all that torch defines
        r"ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"
    ),
]

FLAGS = (
    "--enforce-eager", "--block-size=32", "--max-model-len=1216", "--max-num-seqs=8",
    "--max-num-batched-tokens=128", "--num-gpu-blocks-override=64", "--dtype=float32",
)  # fmt: skip
PROMPT = "Count: 0017 0018"


@pytest.fixture(scope="module")
def loaded() -> MovableLLMs:
    with environment(ENVIRONMENT):
        from kvmig.engines.vllm import flags

        flags.set_environment()
        from examples.async_llms import MovableLLMs

        return MovableLLMs({name: (str(BUNDLED), *FLAGS) for name in "ab"})


async def texts(llm: Any, request_id: str, tokens: int) -> AsyncGenerator[str, None]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    async for output in llm.generate(PROMPT, params, request_id):
        yield output.outputs[0].text


async def test_requests_of_two_async_llms_move_and_their_callers_do_not_notice(
    loaded: MovableLLMs,
) -> None:
    async with loaded as llms:
        quiet = [text async for text in texts(llms["a"], "stays", 300)][-1]
        assert quiet.startswith(" 0019 0020 0021")

        last, moved = "", list[MigrationReport]()
        async for last in texts(llms["a"], "r", 300):
            if len(last) > 40 and not moved:
                moved = await llms.migrate("r", "b")
                assert llms.engine_of("r") == {"b"}
        assert [one.state for one in moved] == ["committed"], moved
        assert last == quiet
        assert llms.engine_of("r") == set()

        left = texts(llms["a"], "left", 900)
        await anext(left)
        assert [one.state for one in await llms.migrate("left", "b")] == ["committed"]
        await left.aclose()  # its caller leaves: it ends where it is now
        async with asyncio.timeout(30):
            while await llms.engines["b"].requests():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert llms.engine_of("left") == set()

        assert await llms["a"].reset_prefix_cache(), "methods of an engine are called as ever"
        with pytest.raises(ConfigError, match="destination is 'c', must be one of a, b"):
            await llms.migrate("r", "c")
        assert await llms.migrate("unknown", "b") == []
