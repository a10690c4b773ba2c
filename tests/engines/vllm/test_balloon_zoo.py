"""Families that people serve: a KV cache of real shape shrinks and grows, and what is computed is
what an engine that is left alone computes; where it can't, the engine says why."""

from __future__ import annotations

import random

import pytest

from kvmig.engines.base import CacheSharing
from tests.engines.vllm.test_vllm_park import resident
from tests.support.balloons import resize
from tests.support.vllm_pair import PROMPT, SAMPLING, Engines, assert_same
from tests.support.vllm_side import AS_SERVED, Configuration, Side
from tests.support.zoo import make

pytestmark = [pytest.mark.engine, pytest.mark.long]

FLAGS = ("--max-num-seqs=8", "--num-gpu-blocks-override=128", AS_SERVED)
LONG = [40 + number * number % 97 for number in range(200)]


def sharing(side: Side) -> CacheSharing:
    found = side.engine.sharing
    assert not isinstance(found, str)
    return found


async def resized(side: Side, blocks: int) -> None:
    granule = sharing(side).room.granule
    await resize(side, blocks * granule, 128 * granule)


@pytest.mark.parametrize("family", ["llama3", "qwen2.5", "llama7b", "deepseek-v2"])
@pytest.mark.parametrize("kind", ["greedy", "penalties"])
async def test_a_real_shape_computes_the_same_while_it_shrinks_grows_and_moves(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, family: str, kind: str
) -> None:
    engines.close()  # the first engine makes vLLM's process groups
    model = make(family, tmp_path_factory.mktemp("zoo"))
    shared = Configuration(model=model, flags=FLAGS, shared=True)
    params = {**SAMPLING[kind], "max_tokens": 30}
    async with engines.lent(shared, shared) as pair:
        for side in (pair.a, pair.b):
            await resized(side, 128)
        alone = {name: await pair.unmoved(prompt, **params) for name, prompt in PROMPTS.items()}
        sizes = random.Random(5)
        for name, prompt in PROMPTS.items():
            pair.submit(pair.a, name, prompt, **params)
            while len(pair.outputs[name].tokens if name in pair.outputs else []) < 8:
                await resized(pair.a, sizes.choice([8, 16, 40, 128]))
                pair.a.step()
                await pair.settle()
            await resized(pair.a, 1)
            await resized(pair.b, 20)
            await pair.move(pair.a, pair.b, name)
            await resized(pair.a, 1)
            assert resident(pair.a) <= sharing(pair.a).room.granule
            await resized(pair.b, 2)
            assert_same(await pair.finish(name), alone[name])
            await pair.idle()
            await resized(pair.a, 128)
    engines.close()


PROMPTS = {"short": PROMPT[:40], "long": LONG}


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next"])
def test_a_cache_of_several_kinds_is_not_shared_and_serves(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    engines.close()  # the first engine makes vLLM's process groups
    model = make(family, tmp_path_factory.mktemp("zoo"))
    side = engines.side(Configuration(model=model, flags=FLAGS, shared=True))
    assert side.engine.sharing == "KV cache of several kinds, windows or states"
    assert side.engine.load().total_blocks > 0
    engines.close()
