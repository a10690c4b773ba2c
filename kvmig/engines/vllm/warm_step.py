"""A step of nothing, after which the next real one is as quick as those that follow.

The first step of an idle engine on a CPU takes longer than the others: its weights' pages and
its code have left the caches and the TLB while others ran. vLLM has a step of nothing for
data-parallel engines (`execute_dummy_batch`); it writes no KV.
"""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from kvmig.engines.vllm import runner


class WarmStep:
    """For engines on a CPU whose dummy step leaves no trace: with LoRA it would forget adapters,
    and a drafter's is not tried."""

    def __init__(self, core: EngineCore) -> None:
        config = core.vllm_config
        self._core = core
        self._possible = (
            config.device_config.device_type == "cpu"
            and config.model_config.runner_type != "pooling"
            and config.lora_config is None
            and config.speculative_config is None
            and not runner.uses_v2(core)
        )

    def run(self) -> None:
        """On the engine's thread, between two steps; nothing if the engine has work."""
        scheduler = self._core.scheduler
        assert isinstance(scheduler, Scheduler)
        if self._possible and not scheduler.running and not scheduler.has_requests():
            self._core.execute_dummy_batch()
