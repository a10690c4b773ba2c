"""Requests of other front ends, as the instances tell of them."""

from __future__ import annotations

import pytest

from kvmig.asgi.errors import AmbiguousRequest
from kvmig.controlplane.messages import ListedRequests
from kvmig.engines.base import RequestState
from kvmig.frontend.inventory import find_other, others_requests


def told(*run_ids: str, front: str = "b", instance: str = "i0") -> dict[str, ListedRequests]:
    states = [RequestState(run_id, "running", 20, 5, 2, 0) for run_id in run_ids]
    return {instance: ListedRequests(0, states, dict.fromkeys(run_ids, front))}


def test_a_run_is_named_as_its_request_and_call() -> None:
    (found,) = others_requests(told("cmpl-x-0-12345678+1"), "a")

    assert (found.row.id, found.row.call_id) == ("cmpl-x-0-12345678", "x")
    assert (found.run_id, found.row.instance) == ("cmpl-x-0-12345678+1", "i0")


def test_ones_own_and_nobodys_are_left_out() -> None:
    nobodys = {"i0": ListedRequests(0, told("cmpl-x-0-12345678")["i0"].requests)}

    assert others_requests(told("cmpl-x-0-12345678", front="a"), "a") == []
    assert others_requests(nobodys, "a") == []


def test_what_two_instances_tell_of_is_one_request() -> None:
    twice = told("chatcmpl-x-12345678") | told("chatcmpl-x-12345678", instance="i1")

    assert [one.row.call_id for one in others_requests(twice, "a")] == ["x"]


def test_one_is_found_by_its_id_or_its_calls() -> None:
    found = others_requests(told("cmpl-x-0-12345678", "chatcmpl-y-12345678"), "a")

    for name in ("x", "cmpl-x-0-12345678"):
        one = find_other(found, name)
        assert one is not None
        assert one.row.call_id == "x"
    assert find_other(found, "z") is None


def test_a_call_of_several_sequences_must_be_named_by_one_of_them() -> None:
    found = others_requests(told("0_cmpl-x-0-12345678", "1_cmpl-x-0-12345678"), "a")

    with pytest.raises(AmbiguousRequest, match="2 live sequences, name one: 0_cmpl-x-0-12345678"):
        find_other(found, "x")
    one = find_other(found, "1_cmpl-x-0-12345678")
    assert one is not None
    assert one.row.id == "1_cmpl-x-0-12345678"


def test_an_id_that_vllm_has_not_made_stands_for_itself() -> None:
    (found,) = others_requests(told("odd"), "a")

    assert (found.row.id, found.row.call_id) == ("odd", "odd")
