"""LoRA adapters of requests that come: loaded before they run, and never too many in a batch.

vLLM's scheduler asserts that the running requests use at most --max-loras adapters, so
whoever puts a request among them asks here first.
"""

from __future__ import annotations

from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvmig.engines.identity import identity_of
from kvmig.engines.vllm.core import StepCore
from kvmig.ground.errors import MigrationRefused


class Adapters:
    """The identities of the adapters that an engine has loaded, by vLLM's numbers."""

    def __init__(self) -> None:
        self._loaded: dict[int, str] = {}

    def identity(self, adapter: LoRARequest | None) -> str:
        """The identity of an adapter that is, or is about to be, loaded; empty for none.

        Raises MigrationRefused where another one is on disk by now: nobody knows whether vLLM,
        which forgets adapters when it has too many, has the former still.
        """
        if adapter is None:
            return ""
        found = identity_of(adapter.lora_path)
        if self._loaded.setdefault(adapter.lora_int_id, found) != found:
            raise MigrationRefused(
                "incompatible", f"LoRA adapter {adapter.lora_name} was replaced after it was loaded"
            )
        return found

    def forget(self, number: int) -> None:
        """Forget an adapter that will be loaded anew the next time."""
        self._loaded.pop(number, None)


def replaced_since(adapter: LoRARequest | None, began: float) -> bool:
    """Whether an adapter's files were written after a request with it came (in Unix time)."""
    folder = Path("/" if adapter is None else adapter.lora_path)
    if adapter is None or not folder.is_dir():
        return False
    return any(file.stat().st_mtime > began for file in folder.glob("adapter_*"))


def load_adapter(core: StepCore, request: Request) -> None:
    """Have the request's adapter in the worker's slots, so that its first step needn't load it.

    Raises MigrationRefused: LoRA is off here, the adapter can't be loaded, no slot is left.
    """
    adapter = request.lora_request
    if adapter is None:
        return
    scheduler = core.scheduler
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
