"""Faults that a request brings along: a logits processor for vLLM's --logits-processors.

In a request's `vllm_xargs`: crash_at: the process dies when the request has so many output
tokens; hang_at: its step takes `hang_s` seconds then, once (the file `hang_file` is removed).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class FaultHooks(AdapterLogitsProcessor):
    """Changes no logits."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        wanted = params.extra_args or {}
        if not wanted.keys() & {"crash_at", "hang_at"}:
            return None

        def fault(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) == wanted.get("crash_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            if len(output_ids) == wanted.get("hang_at") and Path(wanted["hang_file"]).exists():
                Path(wanted["hang_file"]).unlink()
                time.sleep(wanted["hang_s"])
            return logits

        return fault
