"""LoRA adapters of requests that come: loaded before they run, and never too many in a batch.

vLLM takes an adapter's number for what it is: the weights that came first under a number answer all
requests that bear it, and blocks are cached by an adapter's name and path. But front ends give
numbers each for itself, and files may be replaced. So each engine gives its own: one number and
one name for the same files of the same name, independent of the requests' numbers.

vLLM's scheduler asserts that the running requests use at most --max-loras adapters, so
each request that is put among them is resolved here first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from kvmig.core.errors import MigrationRefused
from kvmig.engines.identity import identity_of

_MARK = "@"
"""Separates a name from what makes it an engine's own; front ends' names may have it, too."""


class NamedAdapter(NamedTuple):
    """An adapter as front ends call it, and its files: what has one number in an engine."""

    name: str
    path: str
    fused_experts: bool
    identity: str
    state: str
    """State of its files, see `state_of`."""


class AdapterCore(Protocol):
    """The part of `kvmig.engines.vllm.core.StepCore` that loading needs."""

    scheduler: Scheduler

    def load_adapter(self, own: LoRARequest) -> None: ...


class LoraAdapters:
    """An engine's own numbers and names of adapters. Of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[NamedAdapter, int] = {}
        self._identities: dict[int, str] = {}
        self._found: dict[str, tuple[str, str]] = {}
        """State and identity of each path's files when they were last looked at."""

    def resolve_adapter(self, adapter: LoRARequest) -> LoRARequest:
        """The adapter that a front end means, as this engine calls it, with its files of now."""
        path = str(Path(adapter.lora_path).expanduser())
        identity, state = self._look(path)
        named = NamedAdapter(adapter.lora_name, path, adapter.is_3d_lora_weight, identity, state)
        with self._lock:
            number = self._numbers.setdefault(named, len(self._numbers) + 1)
            self._identities[number] = identity
        return LoRARequest(
            lora_name=f"{named.name}{_MARK}{identity}{_MARK}{state}",
            lora_int_id=number,
            lora_path=named.path,
            base_model_name=adapter.base_model_name,
            is_3d_lora_weight=named.fused_experts,
        )

    def identity(self, own: LoRARequest | None) -> str:
        """The identity of an adapter of this engine's; empty for none."""
        return "" if own is None else self._identities[own.lora_int_id]

    def _look(self, path: str) -> tuple[str, str]:
        """The identity and the state of the files there: what is read is read once."""
        state = state_of(path)
        known = self._found.get(path)
        if known is None or known[0] != state:
            known = self._found[path] = (state, identity_of(path))
        return known[1], state


def state_of(path: str) -> str:
    """Changes with each file in a folder; empty if it is none, as with the name of a repository."""
    folder = Path(path)
    if not folder.is_dir():
        return ""
    digest = blake2b(digest_size=8)
    for file in sorted(folder.iterdir()):
        seen = file.stat()
        digest.update(f"{file.name!r} {seen.st_ino} {seen.st_size} {seen.st_mtime_ns} ".encode())
    return digest.hexdigest()


def given_name(own: LoRARequest) -> str:
    """What front ends call an adapter of an engine's."""
    return own.lora_name.rsplit(_MARK, 2)[0]


def media_name(own: LoRARequest, identifier: str) -> str:
    """The engine's name of media that encoders see with this adapter, from the front ends'."""
    return f"{own.lora_name}:{identifier}"


def unloaded_output(request: Request) -> EngineCoreOutputs:
    """The end of a request whose adapter can't be loaded; why has paths in it, for the log."""
    from kvmig.engines.vllm.outputs import failure  # the front end's, which an engine seldom needs

    own = request.lora_request
    assert own is not None
    said = failure(f"LoRA adapter {given_name(own)} can't be loaded", "final")
    output = EngineCoreOutput(
        request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=said
    )
    return EngineCoreOutputs(outputs=[output], finished_requests={request.request_id})


def is_replaced(own: LoRARequest) -> bool:
    """Whether its files are others than when it got its number."""
    return own.lora_name.rpartition(_MARK)[2] != state_of(own.lora_path)


def replaced_waiting(scheduler: Scheduler, loaded: Callable[[], set[int]]) -> list[Request]:
    """Requests that wait for adapters which were dropped, and whose files were replaced since.

    loaded: numbers of those that the workers have.
    """
    waiting: dict[int, list[Request]] = {}
    for request in scheduler.requests.values():
        if request.lora_request is not None and request.status != RequestStatus.RUNNING:
            waiting.setdefault(request.lora_request.lora_int_id, []).append(request)
    firsts = [some[0].lora_request for some in waiting.values()]
    replaced = {own.lora_int_id for own in firsts if own is not None and is_replaced(own)}
    if replaced:
        replaced -= loaded()
    return [request for number in replaced for request in waiting[number]]


def check_state(own: LoRARequest) -> None:
    """Raise MigrationRefused if its files were replaced after it got its number."""
    if is_replaced(own):
        raise MigrationRefused("incompatible", f"LoRA adapter {given_name(own)} was replaced")


def check_loads(worker: Any) -> None:
    """Let a worker load no files under the number of others; runs in the workers.

    vLLM drops adapters when it has too many, and loads them again when they are wanted.
    """
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        return
    load = manager._load_adapter

    def load_checked(adapter: LoRARequest) -> Any:
        try:
            loaded = load(adapter)
        except LoRAAdapterNotFoundError as error:  # front ends know it by its words
            raise LoRAAdapterNotFoundError(given_name(adapter), adapter.lora_path) from error
        if _MARK in adapter.lora_name:  # those of vLLM's own warm-up have none
            check_state(adapter)
        return loaded

    manager._load_adapter = load_checked


def decode_adapter(given: Any) -> LoRARequest:
    """The adapter of a client's call, as it came over the wire or whole."""
    return msgspec.convert(given, LoRARequest)


def replaced_since(adapter: LoRARequest | None, began: float) -> bool:
    """Whether an adapter's files came to lie there after a request with it came (in Unix time).

    Also older files, which a copy or a link has put there: their inodes were changed by that.
    """
    folder = Path("/" if adapter is None else adapter.lora_path).expanduser()
    if adapter is None or not folder.is_dir():
        return False
    seen = [folder.lstat(), *(file.stat() for file in folder.iterdir())]
    return any(max(one.st_mtime, one.st_ctime) > began for one in seen)


def load_adapter(core: AdapterCore, request: Request) -> None:
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
        core.load_adapter(adapter)
    except Exception as error:  # whatever a broken file makes of it: the request stays
        raise MigrationRefused(
            "incompatible", f"LoRA adapter {given_name(adapter)} can't be loaded here: {error}"
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
