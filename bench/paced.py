"""A vLLM worker whose steps take as long as a GPU's: the CPU waits, as it would for a device.

Engines that share two cores also share their steps: each is slower while another one computes,
and both while a migration runs. Engines with a GPU each share nothing but the host. Here a step
computes the bundled model (about 1.5 ms for a token), and sleeps until its time is up.

Use: `--model device10ms` of a benchmark (any other number, too), which adds vLLM's own flags
`--worker-cls=bench.paced.PacedWorker` and `--additional-config={"step_ms": 10}`: of a decode step,
however many requests are in it, as reading the weights limits it.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

TOKEN_MS = 0.05
"""A step takes so much more for each token: a prefill of 20,000 tokens/s."""


class PacedWorker(CPUWorker):
    """vLLM's CPU worker, at the pace of a device."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's; takes step_ms and TOKEN_MS a token, unless there is nothing to compute."""
        begin = time.perf_counter()
        output = super().execute_model(scheduler_output)
        if tokens := scheduler_output.total_num_scheduled_tokens:
            step_ms = self.vllm_config.additional_config["step_ms"]
            due = begin + (step_ms + TOKEN_MS * tokens) / 1e3
            time.sleep(max(0.0, due - time.perf_counter()))
        return output
