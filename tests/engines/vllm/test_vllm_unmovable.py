"""What the vLLM adapter won't move is said by name, and is never a victim."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvmig.controlplane.messages import PairedDestination, Why
from kvmig.controlplane.victims import next_victim
from kvmig.core.errors import MigrationRefused, UnsupportedLayout
from kvmig.engines.base import EmittedTokens, Frame, RequestState
from kvmig.engines.vllm.building import not_again
from kvmig.engines.vllm.load import RequestHoldings
from kvmig.engines.vllm.movability import check_movable, unmovable_engine, unmovable_kinds
from kvmig.engines.vllm.tables import RequestTables
from kvmig.engines.vllm.warmup import OutputProbe, warm_up_requests
from tests.support.environment import environment
from tests.support.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine

WHYS: tuple[Why, ...] = ("balance", "queue", "defragment", "priority", "drain", "relieve")


def config(
    method: str | None = None,
    *,
    replayssm: bool = False,
    diffusion: bool = False,
    experts: bool = False,
    overlapped: bool = False,
    metrics: str = "none",
    pooling: bool = False,
    encoder: bool = False,
    workers: int = 1,
    device: str = "cuda",
    transfer: KVTransferConfig | None = None,
    pruning: float | None = None,
    mrope: bool = True,
    v2: bool = False,
) -> VllmConfig:
    """What movability reads of vLLM's configuration."""
    return cast(
        "VllmConfig",
        SimpleNamespace(
            model_config=SimpleNamespace(
                is_diffusion=diffusion,
                is_encoder_decoder=encoder,
                runner_type="pooling" if pooling else "generate",
                multimodal_config=SimpleNamespace(video_pruning_rate=pruning),
                uses_mrope=mrope,
            ),
            cache_config=SimpleNamespace(use_replayssm=replayssm),
            aux_output_config=SimpleNamespace(enabled=experts),
            parallel_config=SimpleNamespace(world_size=workers),
            device_config=SimpleNamespace(device_type=device),
            speculative_config=method and SimpleNamespace(method=method),
            scheduler_config=SimpleNamespace(async_scheduling=overlapped),
            observability_config=SimpleNamespace(per_request_spec_decode_metrics=metrics),
            kv_transfer_config=transfer,
            use_v2_model_runner=v2,
        ),
    )


def request(
    outputs: int = 3,
    status: RequestStatus = RequestStatus.RUNNING,
    computed: int = 0,
    **of: Any,
) -> Request:
    """A request of vLLM's own."""
    params = of.pop("params", None) or SamplingParams(max_tokens=100)
    made = Request(
        request_id="r",
        prompt_token_ids=[1] * 64,
        sampling_params=params if isinstance(params, SamplingParams) else None,
        pooling_params=params if isinstance(params, PoolingParams) else None,
        **of,
    )
    made.append_output_token_ids([5] * outputs)
    made.num_computed_tokens = computed
    made.status = status
    return made


TABLES = cast(
    "RequestTables",
    SimpleNamespace(count_blocks=lambda block_ids: len(block_ids[0]), demand=lambda tokens: 5),
)


def row(of: Request, settings: VllmConfig) -> RequestState:
    """As the llumlet sees it."""
    scheduler = SimpleNamespace(
        running=[],
        waiting=[],
        kv_holding_waiting=[],
        policy=SchedulingPolicy.FCFS,
        kv_cache_manager=SimpleNamespace(get_block_ids=lambda request_id: ([1, 2, 3, 4, 5],)),
        _preempt_request=lambda request: None,
        _free_request=lambda request: None,
        _free_blocks=lambda request: None,
    )
    here, transfer = unmovable_engine(settings), settings.kv_transfer_config
    kinds = unmovable_kinds(settings)
    holdings = RequestHoldings(cast("Scheduler", scheduler), TABLES, here, transfer, kinds)
    if of.status is RequestStatus.RUNNING:
        scheduler.running.append(of)
    else:
        cast("Any", scheduler.waiting).add_request(of)
    listing = holdings.listing(None, [], ())
    (state,) = listing.states + holdings.waiting_states(holdings.in_order(listing))
    return state


def chosen(state: RequestState) -> bool:
    """Whether any reason to move requests picks it."""
    return any(
        next_victim(
            [state], PairedDestination("b", "tcp://b", 100, 1000, why, -1), 0, (), {}, 100.0
        )
        for why in WHYS
    )


def stays(of: Request, settings: VllmConfig, because: str) -> None:
    """By name when it is asked for, and never chosen."""
    state = row(of, settings)
    assert state.unmovable == because
    assert not chosen(state)
    with pytest.raises(MigrationRefused, match=because) as refusal:
        check_movable(of, settings)
    assert refusal.value.reason == "unsupported"


DRAFTED = "ngram, draft_model, eagle or eagle3"
ENGINES = {
    "diffusion model": config(diffusion=True),
    "pooling model": config(pooling=True),
    "ReplaySSM, which keeps tokens that its states lack": config(replayssm=True),
    "routed experts, which are gathered until the end": config(experts=True),
    "speculative decoding with asynchronous scheduling": config("ngram", overlapped=True),
    "speculative decoding with per-request metrics": config("draft_model", metrics="detailed"),
    "drafts of several workers on GPUs, whose last writes are not known here": config(
        "eagle", workers=2
    ),
} | {
    f"speculative decoding with {method}, which must be {DRAFTED}": config(method)
    for method in ("mtp", "medusa", "suffix", "ngram_gpu")
}


@pytest.mark.parametrize("because", ENGINES)
def test_an_engine_whose_requests_have_state_that_cannot_travel_keeps_them_all(
    because: str,
) -> None:
    stays(request(), ENGINES[because], because)


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_an_engine_without_such_state_lets_its_requests_go(method: str | None) -> None:
    check_movable(request(), config(method))
    assert chosen(row(request(outputs=50), config(method)))


@pytest.mark.parametrize("settings", [config(pooling=True), config(encoder=True)])
def test_an_engine_that_cannot_answer_tokens_alone_gets_no_request_of_kvmigs_own(
    settings: VllmConfig,
) -> None:
    assert warm_up_requests(settings) == []
    settings.device_config.device_type = "cpu"
    assert not OutputProbe.possible(settings)


REQUESTS: dict[str, dict[str, Any]] = {
    "pooling request": {"params": PoolingParams(task="embed"), "outputs": 0},
    "streaming input": {"resumable": True},
    "prompt embeddings": {"prompt_embeds": torch.zeros(64, 8)},
    "thinking token budget": {"params": SamplingParams(thinking_token_budget=9, max_tokens=50)},
    "prompt log-probabilities still in prefill": {
        "params": SamplingParams(prompt_logprobs=2, max_tokens=50),
        "outputs": 0,
    },
    "request in state WAITING_FOR_REMOTE_KVS": {"status": RequestStatus.WAITING_FOR_REMOTE_KVS},
    "request in state FINISHED_STOPPED": {"status": RequestStatus.FINISHED_STOPPED},
}


@pytest.mark.parametrize("because", REQUESTS)
def test_a_request_whose_state_cannot_travel_stays(because: str) -> None:
    stays(request(**REQUESTS[because]), config(), because)


def with_video() -> Request:
    where = PlaceholderRange(offset=4, length=8)
    return request(outputs=50, mm_features=[MultiModalFeatureSpec(None, "video", "v", where)])


SEEDED = SamplingParams(seed=7, temperature=1.0, max_tokens=100)


def test_what_is_drawn_stays_with_the_drafts_that_a_device_keeps() -> None:
    because = "seeded sampling with drafts, which model runner V2 keeps on the device"
    stays(request(outputs=50, params=SEEDED), config("eagle", v2=True), because)


def test_media_stay_whose_positions_are_put_right_as_they_are_computed() -> None:
    because = "media with video pruning, whose positions only the engine that computed them knows"
    stays(with_video(), config(pruning=0.5), because)


@pytest.mark.parametrize(
    ("of", "settings"),
    [
        (with_video(), config()),
        (with_video(), config(pruning=0.0)),
        (with_video(), config(pruning=0.5, mrope=False)),
        (request(outputs=50), config(pruning=0.5)),
        (request(outputs=50), config("eagle", v2=True)),
        (request(outputs=50, params=SEEDED), config("eagle")),
        (request(outputs=50, params=SEEDED), config(v2=True)),
    ],
)
def test_requests_of_other_kinds_and_of_other_engines_move(
    of: Request, settings: VllmConfig
) -> None:
    check_movable(of, settings)
    assert chosen(row(of, settings))


def connector(name: str, **extra: bool) -> VllmConfig:
    """With a KV connector."""
    transfer = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra
    )
    return config(transfer=transfer)


def transferred(**params: object) -> dict[str, Any]:
    """A request whose call says this to a connector."""
    return {"params": SamplingParams(max_tokens=50, extra_args={"kv_transfer_params": params})}


PULLED, READ = {"do_remote_prefill": True}, {"do_remote_decode": True}
DONE = {"do_remote_prefill": False, "do_remote_decode": False, "remote_block_ids": [1, 2]}
HELD = [
    (
        connector("NixlConnector"),
        {"status": RequestStatus.WAITING_FOR_REMOTE_KVS, "outputs": 0},
        "NixlConnector holds it: blocks of its prompt are on their way",
    ),
    (
        connector("OffloadingConnector"),
        {"status": RequestStatus.WAITING, "computed": 32, "outputs": 0},
        "OffloadingConnector holds it: blocks of its prompt have come, and it begins next",
    ),
    (
        connector("NixlConnector"),
        transferred(**PULLED) | {"status": RequestStatus.WAITING, "outputs": 0},
        "NixlConnector holds it: its prompt's blocks come from another engine",
    ),
    (
        connector("NixlPullConnector"),
        transferred(**READ),
        "NixlPullConnector holds it: another engine reads its blocks when it ends",
    ),
    (
        connector("NixlConnector", bidirectional_kv_xfer=True),
        transferred(**DONE),
        "NixlConnector holds it: its blocks are kept for the next turn when it ends",
    ),
]


@pytest.mark.parametrize(("settings", "of", "because"), HELD)
def test_a_request_that_a_connector_holds_stays_by_the_connectors_name(
    settings: VllmConfig, of: dict[str, Any], because: str
) -> None:
    stays(request(**of), settings, because)


@pytest.mark.parametrize(
    ("settings", "of"),
    [
        (connector("NixlConnector"), {}),
        (connector("NixlConnector"), transferred()),
        (connector("NixlConnector"), transferred(**DONE)),
        (connector("NixlConnector", bidirectional_kv_xfer=True), {}),
        (connector("ExampleConnector"), {}),
        (connector("ExampleConnector"), transferred(**PULLED)),  # which doesn't look at it
        (connector("OffloadingConnector"), transferred(max_load_tokens=9)),
    ],
)
def test_a_request_that_its_engines_connector_does_not_hold_moves(
    settings: VllmConfig, of: dict[str, Any]
) -> None:
    check_movable(request(**of), settings)
    assert chosen(row(request(outputs=20, **of), settings))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=50, prompt_logprobs=2),  # given already: it decodes
        SamplingParams(max_tokens=50, presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParams(max_tokens=50, logit_bias={3: -100.0}, min_p=0.1, seed=7),
        SamplingParams(max_tokens=50, n=2),
    ],
)
def test_a_request_whose_state_travels_may_be_chosen(params: SamplingParams) -> None:
    assert chosen(row(request(outputs=20, params=params), config()))


@pytest.mark.parametrize(
    ("of", "settings", "because"),
    [
        ({"resumable": True}, config(), "streaming input"),
        (
            {"params": SamplingParams(thinking_token_budget=9, max_tokens=50)},
            config(),
            "thinking token budget",
        ),
        ({}, config(experts=True), "routed experts, which are gathered until the end"),
        (
            {"params": SamplingParams(seed=7, temperature=1.0, max_tokens=50)},
            config("ngram"),
            "seeded sampling with speculative decoding",
        ),
        ({"params": SamplingParams(seed=7, temperature=1.0, max_tokens=50)}, config(), ""),
        ({"params": PoolingParams(task="embed"), "outputs": 0}, config(), ""),
    ],
)
def test_what_tokens_alone_do_not_carry_is_not_run_again(
    of: dict[str, Any], settings: VllmConfig, because: str
) -> None:
    assert not_again(cast("Any", request(**of)), settings) == because


LAYOUT = "7 kinds of cache"
TOKENS = 60


@pytest.mark.filterwarnings("ignore")
async def test_an_engine_whose_layout_is_refused_answers_and_says_why_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedLayout(LAYOUT)

    def hear(client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
        for one in engine.decode_outputs(frames):
            tokens.extend(one.token_ids)
            if one.finish_reason:
                finished.set_result(one.finish_reason)

    tokens: list[int] = []
    finished: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with environment(ENVIRONMENT):
        from kvmig.engines.vllm import factory, memory

        monkeypatch.setattr(memory, "SharedCache", refuse)
        engine = factory()
    try:
        engine.connect(hear, lambda *done: None, lambda error: None)
        engine.submit(1, "r", engine.encode_request([1] * 40, TOKENS))
        rows: list[RequestState] = []
        while not rows:
            rows = await engine.requests()
        assert await asyncio.wait_for(finished, 300) == "length"
    finally:
        await engine.close(5.0)
    assert (engine.unmovable, rows[0].unmovable, len(tokens)) == (LAYOUT, LAYOUT, TOKENS)
    assert engine.layout.block_bytes == 0
