"""Bounds what the grammar of one request costs the others of its engine: time to compile, and time
in each step.

vLLM looks into grammars on the engine's own thread, between two steps of all requests, and compiles
them on a thread or two. Here each has a budget. Where it is spent, the request ends with an error
message, and no other one does. Time is that of a thread's own computing: a busy machine uses up no
budget. A request that moves, or runs again, begins with a new one, and pays for its tokens so far.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.errors import Failure
from kvmig.engines.grammar_bounds import GrammarTooLarge, check_grammar
from kvmig.engines.vllm.outputs import failure

log = logging.getLogger(__name__)

T = TypeVar("T")

BUDGET_S = 1.0
"""What a grammar may take of the engine's thread, besides TOKEN_S for each token."""
TOKEN_S = 0.005
COMPILE_S = 10.0
"""What compiling one may take, in computing of its thread. Another one may begin after that
time by the clock."""
WAIT_S = 30.0
"""Longest time to compile one by the clock, on a machine that has no processor for it."""
COMPILES = 2
"""Grammars that are compiled at once."""
ABANDONED = 4
"""Most compiles that go on though none waits for them any more; then no other one begins."""
TOO_SLOW = (
    f"the grammar takes too long: more than {BUDGET_S:g} s of the engine's time"
    f" and {TOKEN_S * 1e3:g} ms per token"
)
REMEMBERED = 1024
"""Reasons of failures that were not asked for yet."""


def check_params(params: object) -> None:
    """Raises vLLM's error, answered with 400, for a grammar that is too large to begin with."""
    wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
    if wanted is None:
        return
    try:
        check_grammar(
            json=wanted.json,
            regex=wanted.regex,
            choice=wanted.choice,
            grammar=wanted.grammar,
            structural_tag=wanted.structural_tag,
        )
    except GrammarTooLarge as error:
        raise VLLMValidationError(str(error), parameter="structured_outputs") from error


class TimedGrammar(StructuredOutputGrammar):
    """Another grammar, until its budget is spent or it fails: from then on it takes no token."""

    def __init__(self, inner: StructuredOutputGrammar) -> None:
        self._inner = inner
        self._spent_s = 0.0
        self._tokens = 0
        self.failure = ""
        """Why it takes no token any more. What is written here stays."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._tokens += len(tokens)
        if self.failure:
            return False
        accepted = self._timed(lambda: self._inner.accept_tokens(request_id, tokens), False)
        if not accepted:
            self._fail(unusable(why_given_up(self._inner)))
        return accepted

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        nothing: list[int] = []
        if self.failure:
            return nothing
        return self._timed(lambda: self._inner.validate_tokens(tokens), nothing)

    def rollback(self, num_tokens: int) -> None:
        self._timed(lambda: self._inner.rollback(num_tokens), None)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        if not self.failure:
            self._timed(lambda: self._inner.fill_bitmask(bitmask, batch_index), None)
        if self.failure:
            bitmask[batch_index].fill_(-1)  # any token: the next one ends it

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def reset(self) -> None:
        self._inner.reset()

    def _timed(self, work: Callable[[], T], failed: T) -> T:
        """What `work` returns, or `failed`: an engine's step ends with no grammar's error."""
        began = time.thread_time()
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the request ends with it
            self._fail(unusable(str(error)))
            return failed
        finally:
            self._spent_s += time.thread_time() - began
            if self._spent_s > BUDGET_S + TOKEN_S * self._tokens:
                self._fail(TOO_SLOW)

    def _fail(self, why: str) -> None:
        self.failure = self.failure or why


def unusable(why: str) -> str:
    """The error message for a grammar that its backend does not take, or gives up."""
    return f"the grammar can't be used: {why[:200]}"


def why_given_up(grammar: StructuredOutputGrammar) -> str:
    """Why a backend takes no token that it has let through itself."""
    matcher = getattr(grammar, "ll_matcher", None)  # llguidance bounds the work for a token
    error: str = "" if matcher is None else matcher.get_error()
    return error.partition("\n")[0] or "it takes no token any more"


class CompilingGrammar(Future[StructuredOutputGrammar]):
    """A grammar that is compiled. vLLM looks again and again whether it is done: that ends it."""

    def __init__(self, clock: TimeSource) -> None:
        super().__init__()
        self._clock = clock
        self.began: float | None = None
        self.computed: TimeSource = lambda: 0.0
        """Seconds that its thread has computed."""
        self.on_late: Callable[[], None] = lambda: None
        """Lets another one begin."""
        self.on_refused: Callable[[str, Failure], None] = lambda *_: None
        """Takes why it is not compiled, before its failure can be seen."""

    def done(self) -> bool:
        if super().done() or self.began is None:
            return super().done()
        waited = self._clock() - self.began
        if self.computed() > COMPILE_S:
            late = TimeoutError(f"compiling it takes longer than {COMPILE_S:g} s")
            self.refuse(late, "refused")
        elif waited > WAIT_S:
            busy = TimeoutError(f"it has not been compiled within {WAIT_S:g} s, try again")
            self.refuse(busy, "retry")
        if super().done() or waited > COMPILE_S:
            self.on_late()
        return super().done()

    def refuse(self, error: Exception, kind: Failure) -> None:
        """Report why the grammar is refused, and end its compilation."""
        self.on_refused(str(error), kind)
        self.finish(error=error)

    def finish(
        self, grammar: StructuredOutputGrammar | None = None, error: BaseException | None = None
    ) -> bool:
        """Whether it was the first to report the outcome."""
        with self._condition:
            if super().done():
                return False
            if grammar is None:
                self.set_exception(error)
            else:
                self.set_result(grammar)
            return True


class GrammarCompiler:
    """Compiles grammars, in the place of vLLM's executor: no one keeps the threads from others."""

    def __init__(
        self,
        clock: TimeSource = monotonic,
        refused: Callable[[str, str, Failure], None] = lambda *_: None,
        thread_clock: Callable[[], TimeSource] | None = None,
    ) -> None:
        """refused: takes a request's id, why its grammar is not compiled, and whose fault it is.

        thread_clock: returns what measures the computing of the thread that calls it.
        """
        self._clock = clock
        self._refused = refused
        self._thread_clock = thread_clock or clock_of_this_thread
        self._lock = threading.Lock()
        self._waiting: deque[tuple[CompilingGrammar, Callable[[], StructuredOutputGrammar]]] = (
            deque()
        )
        self._running: set[CompilingGrammar] = set()
        self._abandoned: set[CompilingGrammar] = set()

    def submit(
        self, create: Callable[[Request], StructuredOutputGrammar], request: Request
    ) -> Future[StructuredOutputGrammar]:
        """`Executor.submit`."""
        one = CompilingGrammar(self._clock)
        one.on_late = lambda: self._abandon(one)
        one.on_refused = lambda reason, kind: self._refused(request.request_id, reason, kind)
        self._waiting.append((one, lambda: create(request)))
        self._begin()
        return one

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """`Executor.shutdown`. The threads are daemons: they end with the process."""
        for compiling, _ in self._waiting:
            compiling.cancel()
        self._waiting.clear()

    def _begin(self) -> None:
        with self._lock:
            if not self._waiting or len(self._running) >= COMPILES:
                return
            one, create = self._waiting.popleft()
            if len(self._abandoned) < ABANDONED:
                self._running.add(one)
                one.began = self._clock()
                name = "kvmig-grammar"
                threading.Thread(
                    target=self._run, args=(one, create), name=name, daemon=True
                ).start()
                return
        one.refuse(RuntimeError("too many others are still being compiled, try again"), "retry")
        self._begin()

    def _run(self, one: CompilingGrammar, create: Callable[[], StructuredOutputGrammar]) -> None:
        one.computed = self._thread_clock()
        try:
            one.finish(create())
        except Exception as error:  # noqa: BLE001 - raised where vLLM asks for the grammar
            one.finish(error=error)
        with self._lock:
            self._running.discard(one)
            self._abandoned.discard(one)
        self._begin()

    def _abandon(self, one: CompilingGrammar) -> None:
        with self._lock:
            if one not in self._running:
                return
            self._running.remove(one)
            self._abandoned.add(one)
        self._begin()


def clock_of_this_thread() -> TimeSource:
    """The computing of the thread that calls this; other threads may read it while it runs."""
    number = time.pthread_getcpuclockid(threading.get_ident())
    before = time.clock_gettime(number)
    return lambda: time.clock_gettime(number) - before


class GrammarLimits:
    """Puts an engine's grammars under limits, and explains why a request has ended for one."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._init = manager.grammar_init
        self._create = manager._create_grammar
        self._accept = manager.accept_tokens
        if hasattr(manager, "executor"):  # it has none without a tokenizer, and no grammars then
            manager.executor.shutdown()
            manager.executor = GrammarCompiler(refused=self._note_unusable)
        manager.grammar_init = self._init_noted
        manager._create_grammar = self._create_timed
        manager.accept_tokens = self._accept_timed

    def explain(self, outputs: EngineCoreOutputs) -> None:
        """Write into outputs in error why they are, where a grammar is the reason."""
        if not self._reasons:
            return
        for one in outputs.outputs:
            if one.finish_reason is FinishReason.ERROR:
                one.stop_reason = self._reasons.pop(one.request_id, one.stop_reason)

    def _init_noted(self, request: Request) -> None:
        """Here the backend is made, whose package may not be installed."""
        try:
            self._init(request)
        except Exception as error:
            self._note_unusable(request.request_id, str(error))
            raise

    def _create_timed(self, request: Request) -> StructuredOutputGrammar:
        try:
            return TimedGrammar(self._create(request))
        except Exception as error:
            self._note_unusable(request.request_id, str(error))
            raise

    def _accept_timed(self, request: Request, new_token_ids: list[int]) -> bool:
        accepted = self._accept(request, new_token_ids)
        guided = request.structured_output_request
        grammar = None if guided is None else guided.grammar
        if isinstance(grammar, TimedGrammar) and grammar.failure:
            self._note(request.request_id, grammar.failure)
            return False
        return accepted

    def _note_unusable(self, request_id: str, why: str, kind: Failure = "refused") -> None:
        self._note(request_id, unusable(why), kind)

    def _note(self, request_id: str, reason: str, kind: Failure = "refused") -> None:
        log.warning("request %s: %s", request_id, reason)
        self._reasons[request_id] = failure(reason, kind)
        if len(self._reasons) > REMEMBERED:
            self._reasons.popitem(last=False)
