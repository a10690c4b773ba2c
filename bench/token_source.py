"""A vLLM worker that computes nothing: a token for each call at the pace of a device.

What is left of an engine is its scheduler and its messages, so that a core has time for what is in
front of it. Requests of kvmig's own (warm-up, measurements at a start) are computed. Use:
`--worker-cls=bench.token_source.TokenSource` and `--additional-config={"step_ms": 6}`: time of a
step, however many calls are in it.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from bench.virtual_gpu import IdleWorker

CALL = "cmpl-"
"""How the ids of completions begin."""


class TokenSource(IdleWorker):
    """Says its token for every call, a step later."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """As the idle one's; takes step_ms, unless there is nothing to do."""
        names = scheduler_output.num_scheduled_tokens
        if not all(one.startswith(CALL) for one in names):
            return CPUWorker.execute_model(self, scheduler_output)
        due = time.perf_counter() + self.vllm_config.additional_config["step_ms"] / 1e3
        output = super().execute_model(scheduler_output)
        if names:
            time.sleep(max(0.0, due - time.perf_counter()))
        return output
