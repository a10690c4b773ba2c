"""What vLLM's own calls do to the identity of an engine's weights, and what it rounds by."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmig.core.errors import MigrationRefused, StartupError
from kvmig.engines.identity import identity_of, updated
from kvmig.models import BUNDLED
from tests.support import count_down
from tests.support.inside import other_weights
from tests.support.vllm_pair import PROMPT, Pair, assert_same
from tests.support.vllm_side import Configuration
from tests.support.vllm_talk import cached

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def configurations(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Configuration, Configuration]:
    """Of nobody else: their weights are loaded again."""
    wanted = Configuration(model=count_down.make(tmp_path_factory.mktemp("weights") / "model"))
    return wanted, wanted


def raised(method: str, *args: Any) -> str:
    from kvmig.engines.vllm.config import after_call

    return after_call("before", method, args, lambda: "on disk")


@pytest.mark.parametrize(
    "call",
    [
        ("sleep", 1),
        ("sleep", 0, "wait"),
        ("wake_up", None),
        ("reset_prefix_cache",),
        ("collective_rpc", "check_health", None, (), {}),
        ("collective_rpc", "init_weight_transfer_engine", None, ({"rank": 0},), None),
    ],
)
def test_calls_that_leave_the_weights_alone_leave_their_identity(call: tuple[Any, ...]) -> None:
    assert raised(*call) == "before"


@pytest.mark.parametrize(
    "call",
    [
        ("sleep", 2),
        ("collective_rpc", "start_weight_update", None, (), None),
        ("collective_rpc", "update_weights", None, ({"names": ["a"]},), None),
        ("collective_rpc", "finish_weight_update", None, (), None),
        ("collective_rpc", "reload_weights", None, (), {"weights_path": "/other"}),
        ("collective_rpc", "a_trainers_own", 60.0, (), {"step": 7}),
    ],
)
def test_updates_raise_it_by_what_they_are_called_with(call: tuple[Any, ...]) -> None:
    assert raised(*call) not in ("before", "on disk")
    assert raised(*call) == raised(*call)
    assert raised("collective_rpc", "update_weights", None, ({"names": ["b"]},)) != raised(*call)


def test_a_checkpoint_that_is_loaded_again_has_its_own() -> None:
    assert raised("collective_rpc", "reload_weights", None, (), None) == "on disk"
    assert raised("collective_rpc", "reload_weights", None, [], {}) == "on disk"


async def test_engines_of_one_checkpoint_agree_and_say_what_they_round_by(pair: Pair) -> None:
    import torch
    import vllm

    a, b = pair.a.engine, pair.b.engine

    assert a.layout.weights == b.layout.weights
    assert a.layout.weights != updated(a.layout.weights)
    assert a.numerics == b.numerics
    words = dict(word.split("=") for word in a.numerics.split())
    assert words["engine"] == "vllm-" + ".".join(vllm.__version__.split(".")[:2])
    assert words["dtype"] == "float32"
    assert (words["threads"], words["workers"]) == (str(torch.get_num_threads()), "1")
    assert words.keys() >= {"attention", "device", "runner", "kv", "compiled"}


async def test_a_request_that_began_before_a_reload_stays_and_later_ones_have_its_identity(
    pair: Pair,
) -> None:
    engine, before = pair.a.engine, pair.a.engine.layout.weights
    await pair.run(pair.a, "old", PROMPT, max_tokens=60, until=10)

    pair.a.core.utility(1, 1, "collective_rpc", ("update_weights", None, ({},), None))
    pair.a.take_calls()  # vLLM refuses it, for no trainer is connected: nobody knows what it did
    await asyncio.sleep(0)

    assert engine.layout.weights == updated(before, "update_weights", ({},))
    with pytest.raises(MigrationRefused, match="updated after it had begun"):
        await engine.export("old")
    await pair.finish("old")

    pair.a.core.utility(1, 2, "collective_rpc", ("reload_weights", None, (), None))
    pair.a.take_calls()
    await asyncio.sleep(0)

    assert engine.layout.weights == before, "what is on disk is what it was"


def test_what_vllm_quantises_itself_is_other_weights() -> None:
    from kvmig.engines.vllm.config import identity_of_args
    from kvmig.engines.vllm.flags import parse

    ways = [
        [],
        ["--quantization=online", '--quantization-config={"linear": "fp8_per_tensor"}'],
        ["--quantization=online", '--quantization-config={"linear": "fp8_per_channel"}'],
    ]
    identities = [identity_of_args(parse([str(BUNDLED), *way])) for way in ways]
    assert len(set(identities)) == 3
    assert identities[0] == identity_of(str(BUNDLED), (None, "auto", {}, None)), "as before"


@pytest.mark.parametrize("side", ["source", "destination"])
async def test_a_request_does_not_move_past_an_update_of_the_weights(pair: Pair, side: str) -> None:
    """Its blocks are of those before: at the destination others would find them as a prefix."""
    unmoved, a, b = await pair.unmoved(PROMPT), pair.a, pair.b
    export = await pair.exported("stays", PROMPT, until=5)
    sent = await pair.done(b.engine.reserve(export))
    sent = await pair.copy_stage(a, b, "stays", sent)
    b.engine.assign("stays", 1)

    async def suspend_and_commit() -> None:
        tail = await pair.suspend(a, "stays", sent)
        await pair.done(b.engine.commit("stays", tail))

    changed = (a if side == "source" else b).engine
    with other_weights(changed), pytest.raises(MigrationRefused, match="weights were updated"):
        await suspend_and_commit()

    await pair.done(b.engine.cancel("stays"))
    await pair.done(a.engine.resume("stays"))
    assert (b.used_blocks, cached(b)) == (0, 0)
    assert_same(await pair.finish("stays"), unmoved)


@pytest.mark.parametrize("call", ["export", "reserve"])
async def test_a_call_that_comes_behind_an_update_counts_as_one_before_it(
    pair: Pair, call: str
) -> None:
    """An update takes seconds, in which a migration may begin: the engine is asked after it."""
    a, b = pair.a.engine, pair.b.engine
    await pair.run(pair.a, "old", PROMPT, until=5)
    export = await pair.done(a.export("old"))
    asked = asyncio.ensure_future(a.export("old") if call == "export" else b.reserve(export))
    await pair.settle()
    changed = a if call == "export" else b
    with other_weights(changed), pytest.raises(MigrationRefused, match="weights were updated"):
        await pair.done(asked)
    await pair.done(a.resume("old"))
    await pair.finish("old")


@pytest.mark.parametrize(
    ("where", "setting", "word"),
    [
        ("model_config", {"logprobs_mode": "processed_logits"}, "logprobs=processed_logits"),
        ("model_config", {"logits_processors": ["a:B", "c:D"]}, "processors=a:B+c:D"),
        ("model_config", {"use_fp64_gumbel": True}, "noise=fp64"),
        ("structured_outputs_config", {"enable_in_reasoning": True}, "guided=enable_in_reasoning"),
    ],
)
async def test_settings_that_make_other_answers_make_another_class(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, where: str, setting: dict[str, Any], word: str
) -> None:
    from kvmig.engines.vllm.config import numerics_of

    usual = numerics_of(pair.a.core).split()
    for name, value in setting.items():
        monkeypatch.setattr(getattr(pair.a.core.vllm_config, where), name, value)
    assert set(numerics_of(pair.a.core).split()) - set(usual) == {word}


async def test_watermarks_of_other_keys_make_other_classes_that_do_not_show_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.watermarking import WatermarkConfig

    from kvmig.engines.vllm.config import numerics_of

    classes = [numerics_of(pair.a.core)]
    for key in (123456789, 123456780):
        mark = WatermarkConfig(key=key)
        monkeypatch.setattr(pair.a.core.vllm_config, "watermark_config", mark)
        classes.append(numerics_of(pair.a.core))
        assert str(key) not in classes[-1]
    assert len(set(classes)) == 3


async def test_weights_that_are_replaced_while_they_are_loaded_end_the_start(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvmig.engines.vllm import serving

    ended: list[str] = []
    found = iter(["before", "after"])

    class Core:
        """Loads nothing."""

        def __init__(self, *args: object) -> None:
            """Anything."""

        def shutdown(self) -> None:
            ended.append("core")

    monkeypatch.setattr(serving, "StepCore", Core)

    with pytest.raises(StartupError, match="were replaced while they were loaded"):
        serving.ServingVllm(pair.a.core.vllm_config, identify=lambda: next(found))
    assert ended == ["core"], "its workers are processes of their own"
