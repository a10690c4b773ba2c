"""Requests that come to model runner V2 from elsewhere, on a GPU that runs behind its host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.states import RequestState

from kvmig.engines.vllm import worker as workers

pytestmark = pytest.mark.engine

SEATS, LONGEST = 8, 64


class LateGpu:
    """In the place of vLLM's kernel that brings what a request has into its row: it runs when the
    GPU gets to it, with its buffers as they are then."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], None]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **_: object) -> None:
            self.launched.append(partial(write_rows, grid[0], *arguments))

        return launch

    def catch_up(self) -> None:
        """Run all that was launched."""
        while self.launched:
            self.launched.pop(0)()


def write_rows(
    count: int,
    out: torch.Tensor,
    stride: int,
    rows: torch.Tensor,
    starts: torch.Tensor,
    contents: torch.Tensor,
    ends: torch.Tensor,
    *_: object,
) -> None:
    begin = 0
    for number in range(count):
        end, at = int(ends[number]), int(rows[number]) * stride + int(starts[number])
        out.view(-1)[at : at + end - begin] = contents[begin:end]
        begin = end


def at_once(data: list[int], device: object, dtype: torch.dtype) -> torch.Tensor:
    """Memory of its own, as on a GPU; pinned memory needs one."""
    return torch.tensor(data, dtype=dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    late = LateGpu()
    monkeypatch.setattr(buffer_utils, "_apply_write_kernel", late)
    return late


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With vLLM's own rows of requests and buffers, and its way to take new ones."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(buffer_utils, "async_tensor_h2d", at_once)
    v2 = MagicMock()
    v2.req_states = RequestState(SEATS, LONGEST, LONGEST, 0, 1000, torch.device("cpu"))
    v2.adaptive_verification = v2.pooling_runner = v2.encoder_cache = v2.sampler = None
    v2.is_last_pp_rank = False
    v2._remove_request = v2.req_states.remove_request
    v2.add_requests = MethodType(GPUModelRunner.add_requests, v2)
    made = SimpleNamespace(model_runner=v2)
    workers.take_with_steps(made)
    return made


def request(name: str) -> NewRequestData:
    tokens = [ord(name)] * (10 + ord(name) % 7)
    return NewRequestData(name, tokens, [], None, None, ([],), 9, None, prefill_token_ids=tokens)


def step(worker: Any, *new: str, ended: str = "", preempted: str = "") -> None:
    brings = [request(name) for name in new]
    worker.model_runner.add_requests(
        SimpleNamespace(
            scheduled_new_reqs=brings,
            finished_req_ids=set(ended),
            preempted_req_ids=set(preempted) or None,
        )
    )


def rows(worker: Any) -> dict[str, list[int]]:
    """The tokens of each request that the GPU knows."""
    states = worker.model_runner.req_states
    return {
        name: states.all_token_ids.gpu[row][: int(states.total_len.gpu[row])].tolist()
        for name, row in states.req_id_to_index.items()
    }


def test_requests_that_come_during_one_step_keep_their_own_tokens(
    worker: Any, gpu: LateGpu
) -> None:
    """Each of them, and one that the next step brings, is launched while that step still runs."""
    for name in "abc":
        workers.register_v2(worker, request(name))
    step(worker, "d")
    gpu.catch_up()
    assert rows(worker) == {name: request(name).prefill_token_ids for name in "abcd"}


def test_a_commit_launches_nothing(worker: Any, gpu: LateGpu) -> None:
    workers.register_v2(worker, request("a"))
    assert not gpu.launched


def test_a_request_is_taken_once(worker: Any, gpu: LateGpu) -> None:
    workers.register_v2(worker, request("a"))
    step(worker)
    gpu.catch_up()
    step(worker)
    assert not gpu.launched


@pytest.mark.parametrize("how", ["ended", "preempted"])
def test_a_request_that_leaves_before_its_first_step_takes_no_row(
    worker: Any, gpu: LateGpu, how: str
) -> None:
    workers.register_v2(worker, request("a"))
    step(worker, "b", **{how: "a"})
    gpu.catch_up()
    assert rows(worker) == {"b": request("b").prefill_token_ids}


def test_one_that_comes_again_before_a_step_is_as_it_came_last(worker: Any, gpu: LateGpu) -> None:
    workers.register_v2(worker, request("a"))
    last = request("a")
    last.prefill_token_ids = [7] * 20
    workers.register_v2(worker, last)
    step(worker)
    gpu.catch_up()
    assert rows(worker) == {"a": [7] * 20}
