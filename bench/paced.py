"""A vLLM worker whose steps take as long as a GPU's: the CPU waits, as it would for a device.

Engines that share two cores also share their steps: each is slower while another one computes,
and both while a migration runs. Engines with a GPU each share nothing but the host. Here a step
computes the bundled model (about 1.5 ms for a token), and sleeps until its time is up.

Use: `--model device10ms` of a benchmark (any other number, too), which adds vLLM's own flags
`--worker-cls=bench.paced.PacedWorker` and `--additional-config={"step_ms": 10}`: of a decode step,
however many requests are in it, as reading the weights limits it.

`device10ms-async` schedules asynchronously, as vLLM does on GPUs (`"overlap": true`): a step is
launched while the one before it runs. What the CPU computes is the launch; the device's own time
begins after it, or when the step before has ended, and the output is there when that is over.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

TOKEN_MS = 0.05
"""A step takes so much more for each token: a prefill of 20,000 tokens/s (`"token_ms"` of the
configuration: another figure)."""


class PacedOutput(AsyncModelRunnerOutput):
    """A step's output, which the host gets when the device has computed it."""

    def __init__(self, output: ModelRunnerOutput | AsyncModelRunnerOutput, due: float) -> None:
        """due: `time.perf_counter`'s."""
        self._output = output
        self._due = due

    def get_output(self) -> ModelRunnerOutput:
        """Wait for it."""
        time.sleep(max(0.0, self._due - time.perf_counter()))
        output = self._output
        return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output


class PacedWorker(CPUWorker):
    """vLLM's CPU worker, at the pace of a device."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        config = vllm_config.additional_config
        self._step_s = config["step_ms"] / 1e3
        self._token_s = config.get("token_ms", TOKEN_MS) / 1e3
        self._overlap = bool(config.get("overlap"))
        self._free_at = 0.0
        """When the device has computed all that was launched."""
        if self._overlap:
            # vLLM's CPU platform turns it off; the engine's core and scheduler are made after this.
            vllm_config.scheduler_config.async_scheduling = True
        super().__init__(vllm_config, *args, **kwargs)

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's; takes step_ms and token_ms a token, unless there is nothing to compute."""
        begin = time.perf_counter()
        output = super().execute_model(scheduler_output)
        if not (tokens := scheduler_output.total_num_scheduled_tokens):
            return output
        takes = self._step_s + self._token_s * tokens
        if self._overlap:
            self._free_at = max(self._free_at, time.perf_counter()) + takes
        else:
            time.sleep(max(0.0, begin + takes - time.perf_counter()))
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's; where steps overlap, the output comes when the device has it."""
        output = super().sample_tokens(grammar_output)
        return PacedOutput(output, self._free_at) if self._overlap else output
