"""A vLLM worker whose steps take as long as a GPU's: the CPU waits, as it would for a device.

Engines that share two cores also share their steps: each is slower while another one computes,
and both while a migration runs. Engines with a GPU each share nothing but the host. Here a step
computes the bundled model (1.5 ms), then sleeps until its time is up.

Use: `--model device10ms` of a benchmark, which adds `--worker-cls=bench.paced.PacedWorker`, vLLM's
own flag.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

STEP_MS = 10.0
"""Of a decode step, however many requests are in it: reading the weights limits it."""
TOKEN_MS = 0.05
"""More for each token: a prefill of 20,000 tokens/s."""


class PacedWorker(CPUWorker):
    """vLLM's CPU worker, at the pace of a device."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's; takes STEP_MS and TOKEN_MS a token, unless there is nothing to compute."""
        begin = time.perf_counter()
        output = super().execute_model(scheduler_output)
        if tokens := scheduler_output.total_num_scheduled_tokens:
            due = begin + (STEP_MS + TOKEN_MS * tokens) / 1e3
            time.sleep(max(0.0, due - time.perf_counter()))
        return output
