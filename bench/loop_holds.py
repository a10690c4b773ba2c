"""For how long one call holds a front end's event loop, in processor time: whatever else runs.

vLLM's own application behind kvmig's middleware in this process, over a made-up engine that puts
out whatever a call asks for. Each hostile kind (`bench.hostile_bodies`), as large as is let
through, is sent a few times. Of each: the longest single turn of the event loop in time of its own
thread's computing, which is what every stream of the front end waits for, and how much memory the
call took at most.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import httpx
import msgspec
import numpy as np
import psutil
import torch
from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder

from bench import report
from bench.hostile_bodies import HostileCall, hostile_calls, ordinary_call
from bench.models import NAMES, model_flags, model_folder
from kvmig.asgi.access import access
from kvmig.core.config import HttpConfig
from kvmig.core.errors import NoInstance
from kvmig.core.priorities import NORMAL
from kvmig.engines.base import Frame
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.vllm import flags
from kvmig.frontend.call_aborts import CallAborts
from kvmig.frontend.middleware import HttpState
from kvmig.frontend.openai.vllm.server import VllmServer
from kvmig.frontend.router import FrontendRouter
from kvmig.frontend.server import leave_what_stays

MODEL = "m"
HOLD_MS = 20.0
HELD_MB = 100.0
TIMES = 3
TOKEN = 17
SAMPLE_S = 0.005
STEP_S = 0.001


@dataclass(frozen=True)
class Hold:
    """One kind. status: of the answer."""

    kind: str
    path: str
    body_mb: float
    status: int
    answer_mb: float
    hold_ms: float
    grown_mb: float
    said: str


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop that knows its longest turn. A wait for something takes no processor time."""

    longest_s = 0.0

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest_s = max(self.longest_s, time.thread_time() - began)


class MadeUpEngine:
    """In place of a router: puts out all that a request asks for, on a thread of its own."""

    def __init__(self, server: VllmServer, vocabulary: int) -> None:
        self._server = server
        self._vocabulary = vocabulary
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._loop = asyncio.get_running_loop()
        self.aborts = CallAborts()

    async def submit(self, request: ClientRequest) -> None:
        given = (request.request_id, request.payload)
        threading.Thread(target=self._run, args=given, daemon=True).start()

    def _run(self, request_id: str, payload: Sequence[Frame]) -> None:
        request: EngineCoreRequest = self._decoder.decode(payload)
        params = request.sampling_params
        if params is None:
            self._put(EngineCoreOutput(
                request_id, [], pooling_output=torch.zeros(8), finish_reason=FinishReason.STOP,
            ))  # fmt: skip
            return
        prompt = self._prompt_logprobs(request.prompt_token_ids or [], params)
        most = params.max_tokens or 1
        for number in range(most):
            end = FinishReason.LENGTH if number == most - 1 else None
            self._put(EngineCoreOutput(
                request_id, [TOKEN], self._logprobs(params), None if number else prompt,
                finish_reason=end,
            ))  # fmt: skip
            time.sleep(STEP_S)

    def _put(self, output: EngineCoreOutput) -> None:
        self._loop.call_soon_threadsafe(self._server.sink.deliver, 0, [output], None)

    def _logprobs(self, params: SamplingParams) -> LogprobsLists | None:
        if (count := params.num_logprobs) is None:
            return None
        width = (self._vocabulary if count < 0 else count) + 1
        ids = np.arange(TOKEN, TOKEN + width, dtype=np.int32)[None, :]
        return LogprobsLists(ids, -ids.astype(np.float32), np.ones(1, np.int32))

    def _prompt_logprobs(self, prompt: list[int], params: SamplingParams) -> LogprobsTensors | None:
        if (count := params.prompt_logprobs) is None or len(prompt) < 2:
            return None
        likeliest = torch.arange(TOKEN, TOKEN + (self._vocabulary if count < 0 else count))
        own = torch.tensor(prompt[1:])[:, None]
        ids = torch.cat([own, likeliest.expand(len(own), -1)], dim=1)
        return LogprobsTensors(ids, -ids.float(), torch.ones(len(own)))

    def priority_of_call(self, asked: int) -> int:
        return asked

    def sequences_of_call(self) -> int:
        return 1

    def is_tenants_call(self) -> bool:
        return False

    async def abort(self, request_ids: Sequence[str], complete: bool) -> None: ...

    async def call(self, method: str, payload: Sequence[Frame]) -> Mapping[str, Sequence[Frame]]:
        raise NoInstance("it has no methods")


class Bench:
    """The application, and who calls it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._loop = cast("TimedLoop", asyncio.get_running_loop())
        self._process = psutil.Process(os.getpid())

    async def hold(self, call: HostileCall, times: int) -> Hold:
        """The shortest of the longest turns, and the most memory: chance only makes it longer."""
        turns: list[float] = []
        grown = 0.0
        answer: httpx.Response | None = None
        for _ in range(times):
            await asyncio.sleep(0.05)
            done = threading.Event()
            peak = [before := self._process.memory_info().rss]
            watch = threading.Thread(target=self._watch, args=(done, peak), daemon=True)
            watch.start()
            self._loop.longest_s = 0.0
            answer = await self._client.post(
                call.path, content=call.body, headers={"content-type": "application/json"}
            )
            await asyncio.sleep(0.02)
            turns.append(self._loop.longest_s)
            done.set()
            watch.join()
            grown = max(grown, (peak[0] - before) / 1e6)
        assert answer is not None
        return Hold(
            call.kind, call.path, round(len(call.body) / 1e6, 3), answer.status_code,
            round(len(answer.content) / 1e6, 2), round(min(turns) * 1e3, 1), round(grown, 1),
            answer.text[:150],
        )  # fmt: skip

    def _watch(self, done: threading.Event, peak: list[int]) -> None:
        while not done.wait(SAMPLE_S):
            peak[0] = max(peak[0], self._process.memory_info().rss)


async def measure(
    model: str, context: int, tasks: Sequence[str], more: Sequence[str], only: Callable[[str], bool]
) -> list[Hold]:
    """All kinds."""
    argv = [str(model_folder(model)), f"--served-model-name={MODEL}", "--enforce-eager"]
    argv += [f"--max-model-len={context}", *model_flags(model), *more]
    holds: list[Hold] = []
    with socket.socket() as sock:
        server = VllmServer(argv, flags.parse(argv), sock, 1)
        await server.load()
    ready = EngineCoreReadyResponse(
        max_model_len=context, num_gpu_blocks=2 * context // 32, block_size=32,
        dp_stats_address=None, dtype="float32", vllm_version="", world_size=1,
        data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1,
        decode_context_parallel_size=1, data_parallel_rank=0, max_num_seqs=256,
        max_num_batched_tokens=2048, instance_id="", supports_lora=False, max_loras=0,
    )  # fmt: skip
    server.learn([msgspec.msgpack.encode((ready, tasks))])
    assert server._config is not None
    vocabulary = server._config.model_config.get_vocab_size()
    app = await server.make_app(cast("FrontendRouter", MadeUpEngine(server, vocabulary)))
    state = HttpState(HttpConfig(), access([], "", "127.0.0.1"), (NORMAL,), CollectorRegistry())
    state.learn(server.reach())
    app.state.kvmig = state
    leave_what_stays()
    transport = httpx.ASGITransport(app=cast("Any", app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        bench = Bench(client)
        calls = (one for one in hostile_calls(MODEL, context, only) if one.size == "fits")
        for call in itertools.chain([ordinary_call(MODEL)], calls):
            await bench.hold(ordinary_call(MODEL), 1)
            one = await bench.hold(call, TIMES)
            holds.append(one)
            report.say(
                f"{one.kind} ({one.body_mb} MB): {one.status}, {one.hold_ms} ms,"
                f" +{one.grown_mb} MB, {one.answer_mb} MB {one.said!r}"
            )
    await server.stop(0.0)
    return holds


def summarise(holds: Sequence[Hold]) -> dict[str, float]:
    """The figures."""
    return {
        "kinds": len(holds),
        "hold_ms_max": max(one.hold_ms for one in holds),
        "above": sum(one.hold_ms > HOLD_MS for one in holds),
        "grown_mb_max": max(one.grown_mb for one in holds),
    }


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--model", default="long", help=f"{', '.join(NAMES)} or a folder")
    root.add_argument(
        "--context", type=int, help="--max-model-len: 131,072, or 16,384 with --quick"
    )
    root.add_argument("--task", default="generate", help="what the model can do, A,B,...")
    root.add_argument("--flag", action="append", default=[], help="a further flag of vLLM's")
    root.add_argument("--only", default="", help="kinds that have one of these words, A,B,...")
    options = root.parse_args(argv)
    words = options.only.split(",")
    context = options.context or (16_384 if options.quick else 131_072)
    settings: dict[str, Any] = {"model": options.model, "context": context}
    result = report.begin("loop_holds", {**settings, "task": options.task, "flags": options.flag})
    flags.set_environment()
    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        holds = runner.run(measure(
            options.model, context, options.task.split(","), options.flag,
            lambda kind: any(one in kind for one in words),
        ))  # fmt: skip
    result.samples = [asdict(one) for one in holds]
    result.summary = summarise(holds)
    result.targets = {"hold_ms_max": {"max": HOLD_MS}, "grown_mb_max": {"max": HELD_MB}}
    rows = [(one.kind, one.body_mb, one.status, one.hold_ms, one.grown_mb) for one in holds]
    columns = ("kind", "MB", "status", "hold ms", "grown MB")
    return report.finish(result, options, [report.table("Longest turns", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
