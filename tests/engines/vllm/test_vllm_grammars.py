"""A grammar costs the others of its engine no more than its budget."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from kvmig.engines.vllm.grammars import (
    ABANDONED,
    BUDGET_S,
    COMPILE_S,
    COMPILES,
    WAIT_S,
    GrammarCompiler,
    GrammarLimits,
    TimedGrammar,
    check_params,
    clock_of_this_thread,
)
from tests.support.waiting import until


class SlowGrammar(StructuredOutputGrammar):
    """Takes everything, and computes so long for each token."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._compute()
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        self._compute()
        return tokens

    def rollback(self, num_tokens: int) -> None: ...

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        self._compute()
        bitmask[batch_index].fill_(0)

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None: ...

    def _compute(self) -> None:
        began = time.thread_time()
        while time.thread_time() - began < self._seconds:
            pass


def test_a_grammar_takes_no_token_once_its_budget_is_spent() -> None:
    grammar = TimedGrammar(SlowGrammar(0.3))
    taken = [grammar.accept_tokens("a", [1]) for _ in range(6)]
    assert taken == [True, True, True, True, False, False]
    mask = torch.zeros((1, 4), dtype=torch.int32)
    began = time.thread_time()
    grammar.fill_bitmask(mask, 0)
    assert grammar.validate_tokens([1]) == []
    assert time.thread_time() - began < 0.1
    assert mask.tolist() == [[-1] * 4]


def test_masks_are_paid_for_out_of_the_same_budget() -> None:
    grammar = TimedGrammar(SlowGrammar(BUDGET_S / 2 + 0.1))
    mask = torch.zeros((1, 4), dtype=torch.int32)
    grammar.fill_bitmask(mask, 0)
    assert not grammar.failure
    grammar.fill_bitmask(mask, 0)
    assert grammar.failure


def test_a_long_answer_of_a_quick_grammar_goes_on() -> None:
    grammar = TimedGrammar(SlowGrammar(0.001))
    assert all(grammar.accept_tokens("a", [1]) for _ in range(2000))


def test_waiting_for_a_processor_costs_a_grammar_nothing() -> None:
    class Waits(SlowGrammar):
        def _compute(self) -> None:
            time.sleep(0.6)

    grammar = TimedGrammar(Waits())
    assert [grammar.accept_tokens("a", [1]) for _ in range(3)] == [True] * 3


class Clock:
    """Time goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


REQUEST = cast("Request", SimpleNamespace(request_id="a"))


class Compiler:
    """A compiler whose grammars take as long, and compute as long, as a test says."""

    def __init__(self) -> None:
        self.clock, self.computing = Clock(), Clock()
        self.said: list[str] = []
        self.end = threading.Event()
        self._compiler = GrammarCompiler(
            self.clock,
            lambda _, why, kind: self.said.append(f"{kind}: {why}"),
            lambda: self.computing,
        )

    def compile(self, slow: bool = False) -> Future[StructuredOutputGrammar]:
        """slow: until the test's end."""

        def create(_: Request) -> StructuredOutputGrammar:
            if slow:
                self.end.wait(60)
            return SlowGrammar()

        return self._compiler.submit(create, REQUEST)

    def let_pass(self, seconds: float, computing: float) -> None:
        """Time by the clock, and the computing of each grammar's thread in it."""
        self.clock.now += seconds
        self.computing.now += computing


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.end.set()


async def test_a_grammar_whose_compiling_computes_too_long_is_the_clients_fault(
    compiler: Compiler,
) -> None:
    slow = compiler.compile(slow=True)
    await asyncio.sleep(0.05)
    compiler.let_pass(COMPILE_S + 1, computing=COMPILE_S + 1)
    assert slow.done()
    assert compiler.said == [f"refused: compiling it takes longer than {COMPILE_S:g} s"]
    with pytest.raises(TimeoutError, match="compiling it takes longer than 10 s"):
        slow.result(0)


async def test_a_grammar_that_a_busy_machine_does_not_compile_may_be_tried_again(
    compiler: Compiler,
) -> None:
    slow = compiler.compile(slow=True)
    compiler.let_pass(WAIT_S - 1, computing=2)
    assert not slow.done()
    compiler.let_pass(2, computing=0)
    assert slow.done()
    assert compiler.said == ["retry: it has not been compiled within 30 s, try again"]


async def test_a_grammar_that_a_busy_machine_compiles_late_is_used(compiler: Compiler) -> None:
    slow = compiler.compile(slow=True)
    compiler.let_pass(COMPILE_S + 5, computing=2)
    assert not slow.done()
    compiler.end.set()
    assert isinstance(slow.result(5), SlowGrammar)
    assert compiler.said == []


async def test_grammars_that_compile_for_ever_keep_no_other_one_waiting(
    compiler: Compiler,
) -> None:
    slow = [compiler.compile(slow=True) for _ in range(COMPILES)]
    quick = compiler.compile()
    assert not quick.done()
    compiler.let_pass(COMPILE_S + 1, computing=0)
    assert not any(one.done() for one in slow)
    await until(quick.done)
    assert isinstance(quick.result(), SlowGrammar)


async def test_with_many_that_compile_for_ever_no_further_one_begins(compiler: Compiler) -> None:
    for _ in range(ABANDONED):
        one = compiler.compile(slow=True)
        compiler.let_pass(COMPILE_S + 1, computing=0)
        one.done()
    refused = compiler.compile()
    with pytest.raises(RuntimeError, match="too many others"):
        refused.result(0)
    assert compiler.said[-1].startswith("retry: ")
    compiler.end.set()
    await until(lambda: compiler.compile().exception(5) is None)


def test_the_clock_of_a_thread_counts_its_computing_only_and_is_read_from_others() -> None:
    clocks = list[Callable[[], float]]()
    ready, end = threading.Event(), threading.Event()

    def work() -> None:
        clocks.append(clock_of_this_thread())
        SlowGrammar(0.05).accept_tokens("a", [1])
        ready.set()
        end.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(10)
    time.sleep(0.2)
    assert 0.05 <= clocks[0]() < 0.15
    end.set()
    thread.join()


class Manager:
    """The part of vLLM's that is bounded."""

    def __init__(self, grammar: StructuredOutputGrammar | Exception) -> None:
        self.executor = SimpleNamespace(shutdown=lambda: None)
        self._grammar = grammar

    def grammar_init(self, request: Request) -> None:
        if isinstance(self._grammar, Exception):
            raise self._grammar

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        if isinstance(self._grammar, Exception):
            raise self._grammar
        return self._grammar

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        accepted: bool = request.structured_output_request.grammar.accept_tokens("a", tokens)
        return accepted


def ended(request_id: str) -> EngineCoreOutputs:
    """As vLLM's scheduler ends a request whose grammar took no token, or didn't compile."""
    return EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)]
    )


def test_the_request_ends_with_a_sentence_and_another_error_without_one() -> None:
    manager = Manager(SlowGrammar(BUDGET_S + 0.1))
    limits = GrammarLimits(cast("StructuredOutputManager", manager))
    grammar = manager._create_grammar(REQUEST)
    guided = SimpleNamespace(grammar=grammar)
    request = SimpleNamespace(request_id="a", structured_output_request=guided)
    assert not manager.accept_tokens(request, [1])

    for name, said in (("b", None), ("a", "refused: the grammar takes too long"), ("a", None)):
        outputs = ended(name)
        limits.explain(outputs)
        reason = outputs.outputs[0].stop_reason
        assert reason is None if said is None else str(reason).startswith(said)


def test_a_grammar_that_does_not_compile_says_why() -> None:
    manager = Manager(ValueError("it has no rule 'root'"))
    limits = GrammarLimits(cast("StructuredOutputManager", manager))
    with pytest.raises(ValueError, match="root"):
        manager._create_grammar(REQUEST)
    outputs = ended("a")
    limits.explain(outputs)
    expected = "refused: the grammar can't be used: it has no rule 'root'"
    assert outputs.outputs[0].stop_reason == expected


def test_a_grammar_whose_backend_can_not_be_made_says_why() -> None:
    manager = Manager(ModuleNotFoundError("No module named 'outlines_core'"))
    limits = GrammarLimits(cast("StructuredOutputManager", manager))
    with pytest.raises(ModuleNotFoundError):
        manager.grammar_init(REQUEST)
    outputs = ended("a")
    limits.explain(outputs)
    expected = "refused: the grammar can't be used: No module named 'outlines_core'"
    assert outputs.outputs[0].stop_reason == expected


class GivesUp(SlowGrammar):
    """Takes no token."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return False


class Parser(GivesUp):
    """As of llguidance."""

    ll_matcher = SimpleNamespace(get_error=lambda: "Current row has 5207 items; max is 2000")


class Raises(SlowGrammar):
    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        raise RuntimeError("a rule is missing")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (GivesUp(), "it takes no token any more"),
        (Parser(), "Current row has 5207 items; max is 2000"),
        (Raises(), "a rule is missing"),
    ],
)
def test_a_grammar_that_its_backend_gives_up_says_why(
    grammar: StructuredOutputGrammar, why: str
) -> None:
    manager = Manager(grammar)
    limits = GrammarLimits(cast("StructuredOutputManager", manager))
    guided = SimpleNamespace(grammar=manager._create_grammar(REQUEST))
    request = SimpleNamespace(request_id="a", structured_output_request=guided)
    assert not manager.accept_tokens(request, [1])
    outputs = ended("a")
    limits.explain(outputs)
    assert outputs.outputs[0].stop_reason == f"refused: the grammar can't be used: {why}"


def test_a_mask_that_can_not_be_made_ends_its_request_and_no_step() -> None:
    class NoMask(SlowGrammar):
        def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
            raise RuntimeError("no mask")

    grammar = TimedGrammar(NoMask())
    mask = torch.zeros((1, 4), dtype=torch.int32)
    grammar.fill_bitmask(mask, 0)
    assert mask.tolist() == [[-1] * 4]
    assert not grammar.accept_tokens("a", [1])
    assert grammar.failure == "the grammar can't be used: no mask"


def test_a_budget_that_was_spent_once_stays_spent() -> None:
    """Each token adds to it: with the next one the grammar would be asked again."""
    grammar = TimedGrammar(SlowGrammar(BUDGET_S + 0.001))
    grammar.fill_bitmask(torch.zeros((1, 4), dtype=torch.int32), 0)
    assert not grammar.accept_tokens("a", [1])


def test_too_large_a_grammar_is_vllms_own_kind_of_refusal() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"] * 5000))
    with pytest.raises(VLLMValidationError, match="choice has 5000 entries, allowed are 4096"):
        check_params(params)
    check_params(SamplingParams())
