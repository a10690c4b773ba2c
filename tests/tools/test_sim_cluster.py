from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.messages import PairedDestination
from kvmig.controlplane.policy import policy_of
from kvmig.core.config import SchedulerConfig
from kvmig.core.errors import ConfigError
from kvmig_tools.sim import cost
from kvmig_tools.sim.cluster import SimCluster
from kvmig_tools.sim.cost import CostModel
from kvmig_tools.sim.outcomes import Outcomes
from kvmig_tools.sim.policies import NAMES, SETTINGS, policy, setting
from kvmig_tools.sim.request import SimRequest
from kvmig_tools.sim.run import Result, Run, simulate
from kvmig_tools.simulate import main, parser, runs_of
from tests.support.examples import examples


def small(prefill: str = "first", blocks: int = 24, cache: bool = False) -> CostModel:
    """An A10 with little memory, so that requests are preempted and move."""
    model = cost.load("a10-llama7b")
    capacity = msgspec.structs.replace(
        model.capacity,
        blocks=blocks,
        prefill=prefill,
        max_batch_tokens=300,
        max_sequences=8,
        watermark=0.0,
        prefix_cache=cache,
    )
    return msgspec.structs.replace(model, capacity=capacity)


def run(
    requests: Iterable[SimRequest],
    name: str = "kvmig",
    model: CostModel | None = None,
    around: str = "live",
    instances: int = 3,
) -> Outcomes:
    """Raises AssertionError if an instance holds anything at the end."""
    cluster = SimCluster(
        requests, instances, model or small(), policy(name), setting(around), Outcomes()
    )
    return cluster.run()


REQUESTS = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 200), st.integers(1, 120), st.sampled_from([-1, 0])),
    min_size=1,
    max_size=40,
)


@given(
    REQUESTS,
    st.sampled_from(NAMES),
    st.sampled_from(["first", "chunked"]),
    st.sampled_from([*SETTINGS]),
    st.booleans(),
)
@examples(80)
def test_every_request_ends_whole_and_every_block_is_free_again(
    rows: list[tuple[float, int, int, int]], name: str, prefill: str, around: str, cache: bool
) -> None:
    requests = [
        SimRequest(index, at, prompt, output, priority, "p" if index % 3 else "", 40)
        for index, (at, prompt, output, priority) in enumerate(sorted(rows))
    ]
    outcomes = run(requests, name, small(prefill, cache=cache), around)
    assert len(outcomes.table()) + outcomes.refused == len(requests)
    for request in requests:
        if request.finished_at == request.finished_at:
            assert request.tokens == request.final_tokens
            assert request.arrival < request.first_token_at <= request.finished_at
            assert request.lost_s >= 0


def test_a_prompt_that_is_cached_is_not_computed_again() -> None:
    def first_tokens(cache: bool) -> list[float]:
        requests = [SimRequest(n, 5.0 * n, 200, 2, 0, "same", 160) for n in range(2)]
        run(requests, model=small(cache=cache), instances=1)
        return [one.first_token_at - one.arrival for one in requests]

    first, second = first_tokens(cache=True)
    assert second < first / 2
    assert first_tokens(cache=False)[1] == pytest.approx(first)


def test_what_is_cached_goes_when_its_blocks_are_taken() -> None:
    requests = [
        SimRequest(0, 0.0, 200, 2, 0, "same", 160),
        SimRequest(1, 5.0, 370, 2),  # takes 24 of 24 blocks
        SimRequest(2, 10.0, 200, 2, 0, "same", 160),
    ]
    run(requests, model=small(cache=True), instances=1)
    first, _, last = (one.first_token_at - one.arrival for one in requests)
    assert last == pytest.approx(first)


def test_a_prompt_counts_once_as_asked_and_found_however_often_it_is_preempted() -> None:
    requests = [SimRequest(n, 0.0, 150, 100) for n in range(2)]
    model, rules = small(cache=True), policy("round-robin")
    cluster = SimCluster(requests, 1, model, rules, setting("live"), Outcomes())
    outcomes = cluster.run()
    assert outcomes.column("preemptions").sum() > 0
    assert cluster.llumlets["i0"].engine.prompt_tokens == (300, 0)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 200), st.integers(1, 120)), min_size=1),
    st.sampled_from(NAMES),
    st.floats(0, 4),
    st.sampled_from(["add_instance", "drain_instance", "kill_instance"]),
)
@examples(40)
def test_every_request_ends_whole_where_an_instance_comes_or_goes(
    rows: list[tuple[float, int, int]], name: str, at: float, change: str
) -> None:
    requests = [SimRequest(number, *row, 0, "p", 40) for number, row in enumerate(rows)]
    model, around = small(cache=True), setting("live")
    cluster = SimCluster(requests, 3, model, policy(name), around, Outcomes(), by_prefixes=True)
    named = () if change == "add_instance" else ("i1",)
    cluster.events.at(at, lambda: getattr(cluster, change)(*named))
    cluster.run()
    assert [one.generated for one in requests] == [output for _, _, output in rows]
    assert len(cluster.llumlets) == 3 + (change == "add_instance")


def test_requests_of_a_killed_instance_are_computed_again_elsewhere() -> None:
    requests = [SimRequest(number, 0.0, 100, 60) for number in range(2)]
    cluster = SimCluster(
        requests, 2, small(cache=True), policy("round-robin"), setting("live"), Outcomes()
    )
    cluster.events.at(0.5, lambda: cluster.kill_instance("i0"))
    cluster.run()
    assert [one.preemptions for one in requests] == [1, 0]
    assert all(one.generated == 60 for one in requests)


def copied_bytes(prefixes: tuple[str, str]) -> float:
    """Of moving a request to where another is running."""
    requests = [SimRequest(n, 0.0, 200, 60, 0, prefixes[n], 160) for n in range(2)]
    cluster = SimCluster(
        requests,
        2,
        small(blocks=64, cache=True),
        policy("round-robin"),
        setting("live"),
        Outcomes(),
    )
    order = [PairedDestination("i1", "", math.inf, math.inf)]
    cluster.events.at(1.0, lambda: cluster.llumlets["i0"].pair(order))
    cluster.events.at(1.1, lambda: cluster.llumlets["i0"].pair([]))
    outcomes = cluster.run()
    assert outcomes.migrations["committed"] == 1
    return outcomes.copied_bytes


def test_what_the_destination_has_cached_is_not_copied() -> None:
    block = 16 * small().copy.bytes_per_token
    assert copied_bytes(("a", "b")) - copied_bytes(("a", "a")) == 160 // 16 * block


def full_pair(order_at: float) -> tuple[SimCluster, list[SimRequest]]:
    """A request fills each of two instances; another waits behind the first, and is to move."""
    requests = [SimRequest(n, 0.0, 330, 40) for n in range(2)] + [SimRequest(2, 0.2, 200, 5)]
    cluster = SimCluster(requests, 2, small(), policy("round-robin"), setting("live"), Outcomes())
    here = cluster.llumlets["i0"]
    order = [PairedDestination("i1", "", math.inf, math.inf, "queue")]
    cluster.events.at(order_at, lambda: here.pair(order))
    cluster.events.at(order_at + 0.001, lambda: here.pair([]))
    return cluster, requests


def test_one_that_waits_moves_to_where_it_has_no_room_yet_and_waits_there() -> None:
    cluster, requests = full_pair(0.4)
    queues = [one.engine.waiting for one in cluster.llumlets.values()]
    seen: list[list[SimRequest]] = []
    cluster.events.at(1.0, lambda: seen.extend(list(queue) for queue in queues))
    outcomes = cluster.run()
    assert seen == [[], [requests[2]]]
    assert outcomes.migrations == {"committed": 1}
    assert outcomes.copied_bytes == 0


def test_one_that_starts_about_when_it_is_to_move_gets_all_its_tokens() -> None:
    ends: set[str] = set()
    for at in range(1500, 2500, 10):
        cluster, requests = full_pair(at / 1e3)
        outcomes = cluster.run()
        ends |= outcomes.migrations.keys()
        assert all(one.tokens == one.final_tokens for one in requests)
    assert ends == {"committed"}


@pytest.mark.parametrize("name", NAMES)
def test_each_policy_runs_a_workload(name: str) -> None:
    result = simulate(Run(trace="S-S", policy=name, rate=34.0, requests=600)).result
    assert result.figures["requests"] == 600
    assert result.figures["refused"] == 0


def test_the_same_seed_gives_the_same_bytes() -> None:
    given_ = Run(trace="M-M", policy="llumnix", rate=8.0, requests=400, cv=4.0, high_share=0.1)
    first, second = simulate(given_), simulate(given_)
    assert msgspec.json.encode(first.result) == msgspec.json.encode(second.result)
    assert first.outcomes.table().tobytes() == second.outcomes.table().tobytes()


def test_requests_move_and_none_is_preempted_meanwhile() -> None:
    result = simulate(
        Run(trace="L-L", policy="llumnix", rate=3.0, requests=1000, setting="text")
    ).result
    assert result.figures["migrations"] > 0
    assert result.figures["loss_mean_s"] < 0.5


class Secret:
    """Stands for a request's length: whoever compares or counts with it is caught."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def _caught(self, *_: object) -> int:
        raise AssertionError("a policy looked at a request's length")

    __int__ = __index__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _caught
    __add__ = __radd__ = __sub__ = __rsub__ = __eq__ = __hash__ = _caught  # type: ignore[assignment]


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_sees_a_requests_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length is poison while reports, rounds, dispatch and victims run."""
    cluster = SimCluster(
        [SimRequest(n, n * 0.01, 40, 60) for n in range(60)],
        3, small(), policy(name), setting("live"), Outcomes(),
    )  # fmt: skip
    looked = 0

    def poisoned(step: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            nonlocal looked
            looked += 1
            running = [one for each in cluster.llumlets.values() for one in each.here.values()]
            lengths = [one.final_tokens for one in running]
            for one in running:
                one.final_tokens = Secret(one.final_tokens)  # type: ignore[assignment]
            try:
                step(*args)
            finally:
                for one, tokens in zip(running, lengths, strict=True):
                    one.final_tokens = tokens

        return call

    for name_ in ("_round", "_place"):
        monkeypatch.setattr(cluster, name_, poisoned(getattr(cluster, name_)))
    outcomes = cluster.run()
    assert looked >= 60
    assert len(outcomes.table()) == 60


def test_a_request_larger_than_an_instance_is_refused() -> None:
    outcomes = run([SimRequest(0, 0.0, 24 * 16, 1), SimRequest(1, 0.0, 10, 5)])
    assert outcomes.refused == 1
    assert len(outcomes.table()) == 1


def test_one_request_alone_takes_what_the_cost_model_says() -> None:
    model = cost.load("a10-llama7b")
    request = SimRequest(0, 0.0, 100, 3)
    run([request], model=model)
    first = (5.6 + 0.203 * 100 + 5.1e-6 * 100**2) / 1e3
    steps = sum(39.8 + 0.667 + 0.86e-3 * context for context in (101, 102)) / 1e3
    assert request.first_token_at == pytest.approx(first)
    assert request.finished_at == pytest.approx(first + steps)


def test_prompts_in_chunks_let_others_decode_on() -> None:
    def gap(prefill: str) -> float:
        long = SimRequest(1, 0.5, 290, 2)
        short = SimRequest(0, 0.0, 10, 60)
        model = msgspec.structs.replace(
            small(prefill),
            capacity=msgspec.structs.replace(
                small(prefill).capacity, max_batch_tokens=64 if prefill == "chunked" else 300
            ),
        )
        run([short, long], model=model, instances=1)
        return long.first_token_at

    assert gap("chunked") > gap("first")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--policy", "fifo"], "--policy is fifo, must be"),
        (["--rate", "-1"], "--rate is -1.0, must be more than 0"),
        (["--gpu", "tpu"], "--gpu is tpu, must be"),
        (["--instances", "0"], "--instances is 0, must be 1 or more"),
        (["--high-share", "2"], "--high-share is 2.0, must be from 0 to 1"),
        (["--scale", "5"], "--scale is 5, must be two numbers"),
        (["--scale", "60,10"], "is 60,10, must be x,y with 0 <= x < y"),
        (["--cv", "0"], "--cv is 0.0, must be more than 0"),
    ],
)
def test_bad_flags_are_one_sentence(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trace", "S-S", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_bad_row_of_a_trace_is_one_sentence_with_file_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n0,5,6\n1,5,-6\n")
    assert main(["--trace", str(file), "--workers", "1"]) == 2
    says = f"{file}:3: output_tokens is '-6', must be a whole number of at least 1"
    assert capsys.readouterr().err.strip().endswith(f"kvmig_tools.simulate: {says}")


def test_infaas_is_least_loaded_by_the_papers_name() -> None:
    by_name = [
        simulate(Run(trace="M-M", policy=name, rate=8.0, requests=200)).result.figures
        for name in ("infaas++", "least-loaded")
    ]
    assert by_name[0] == by_name[1]


def test_two_calls_write_equal_bytes(tmp_path: Path) -> None:
    flags = ["--trace=M-M", "--requests=40", "--policy=kvmig", "--policy=llumnix-artifact"]
    for name, workers in (("a", 1), ("b", 2)):
        assert main([*flags, f"--workers={workers}", f"--out={tmp_path / name}"]) == 0
    assert (tmp_path / "a/results.json").read_bytes() == (tmp_path / "b/results.json").read_bytes()


def test_an_unknown_trace_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="--trace is X, must be"):
        runs_of(parser().parse_args(["--trace", "X"]))


@pytest.mark.parametrize("name", ["least-loaded", "kvmig"])
def test_instances_come_and_go_with_the_load(name: str) -> None:
    scaled = Run(trace="L-L", policy=name, rate=1.5, requests=300, scale=(10, 60))
    figures = simulate(scaled).result.figures
    assert figures["requests"] == 300
    assert 1 < figures["instances_mean"] < 16


def test_results_and_pictures_are_written(tmp_path: Path) -> None:
    flags = ["--trace", "S-S", "--requests", "200", "--policy", "llumnix", "--workers", "1"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json", "latencies.png", "time.png", "memory.png", "migrations.png",
    }  # fmt: skip
    (result,) = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=list[Result])
    assert result.figures["requests"] == 200


@given(REQUESTS, st.sets(st.sampled_from(["i0", "i1", "i2"]), max_size=2), st.booleans())
@examples(60)
def test_with_prompts_at_instances_of_their_own_every_request_ends_whole_too(
    rows: list[tuple[float, int, int, int]], apart: set[str], cache: bool
) -> None:
    requests = [
        SimRequest(index, at, prompt, output, priority, "p" if index % 3 else "", 40)
        for index, (at, prompt, output, priority) in enumerate(sorted(rows))
    ]
    config = SchedulerConfig(prompt_instances=tuple(sorted(apart)))
    model = small("chunked", blocks=40, cache=cache)
    cluster = SimCluster(requests, 3, model, policy_of(config), setting("live"), Outcomes())
    outcomes = cluster.run()
    assert len(outcomes.table()) + outcomes.refused == len(requests)
