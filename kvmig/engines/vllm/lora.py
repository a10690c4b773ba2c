"""LoRA adapters of requests that come: loaded before they run, and never too many in a batch.

vLLM's scheduler asserts that the running requests use at most --max-loras adapters, so
whoever puts a request among them asks here first.
"""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from kvmig.ground.errors import MigrationRefused


def load_adapter(core: EngineCore, request: Request) -> None:
    """Have the request's adapter in the worker's slots, so that its first step needn't load it.

    Raises MigrationRefused: LoRA is off here, the adapter can't be loaded, no slot is left.
    """
    adapter = request.lora_request
    if adapter is None:
        return
    scheduler = core.scheduler
    assert isinstance(scheduler, Scheduler)
    if scheduler.lora_config is None:
        raise MigrationRefused("incompatible", "a LoRA request, and --enable-lora is off here")
    check_slot(scheduler, request)
    try:
        core.add_lora(adapter)
    except Exception as error:  # whatever a broken file makes of it: the request stays
        raise MigrationRefused(
            "incompatible", f"LoRA adapter {adapter.lora_name} can't be loaded here: {error}"
        ) from error


def has_slot(scheduler: Scheduler, request: Request) -> bool:
    """Whether the request may join those that run now."""
    if scheduler.lora_config is None or request.lora_request is None:
        return True
    running = {
        one.lora_request.lora_int_id for one in scheduler.running if one.lora_request is not None
    }
    return len(running | {request.lora_request.lora_int_id}) <= scheduler.lora_config.max_loras


def check_slot(scheduler: Scheduler, request: Request) -> None:
    """Raise MigrationRefused if the request's adapter is one too many."""
    if not has_slot(scheduler, request):
        raise MigrationRefused("no_batch_slot", "as many LoRA adapters run as --max-loras allows")
