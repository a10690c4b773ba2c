"""vLLM's KV connectors (`--kv-transfer-config`): which of them kvmig knows, and which requests one
holds, so that they stay where they are. All others of the same engine move.

A connector is known once it has been read what it keeps of a request between two steps:

- `ExampleConnector` saves a prompt in the step that computes it, and loads one in the step that
  needs it. Between two steps it keeps nothing.
- `NixlConnector` (and `NixlPullConnector`, its other name) gets a prompt's blocks from another
  engine while the request waits for them, and keeps blocks that another engine reads once a
  request has ended. It acts on requests alone whose calls have `kv_transfer_params`.

vLLM's own offload to the host keeps a state for each request: `kvmig.engines.vllm.offload`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvmig.core.errors import StartupError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

NATIVE = "OffloadingConnector"
"""vLLM's own offload, which comes by --kv-offloading-size."""
EXAMPLE = "ExampleConnector"
NIXL = ("NixlConnector", "NixlPullConnector")
KNOWN = (EXAMPLE, *NIXL)
"""Connectors that --kv-transfer-config may name."""
PARAMS = "kv_transfer_params"
"""What a call says to a connector, among its `extra_args`."""
_LOADS = "WAITING_FOR_REMOTE_KVS"
_QUEUED = ("WAITING", "PREEMPTED")

PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""The variable with the port where NIXL asks an engine for its registered memory; vLLM adds the
data parallel rank."""
FIRST_PORT = 5600
"""vLLM's default."""
MOST_PORTS = 256
"""Ports that are tried from the first on."""


def is_known(transfer: KVTransferConfig | None) -> bool:
    """Whether it is known what this connector holds. One of a module of the user's isn't."""
    if transfer is None or transfer.kv_connector_module_path:
        return False
    return transfer.kv_connector in KNOWN


def why_held(request: Request, transfer: KVTransferConfig | None) -> str:
    """Why the engine's connector holds the request now, in a few words; empty: it doesn't."""
    if transfer is None:
        return ""
    name = transfer.kv_connector
    if request.status.name == _LOADS:
        return f"{name} holds it: blocks of its prompt are on their way"
    if request.status.name in _QUEUED and request.num_computed_tokens:
        return f"{name} holds it: blocks of its prompt have come, and it begins next"
    params: Mapping[str, Any] | None = request.kv_transfer_params
    if not params or name not in NIXL:
        return ""
    if params.get("do_remote_prefill"):
        return f"{name} holds it: its prompt's blocks come from another engine"
    if params.get("do_remote_decode"):
        return f"{name} holds it: another engine reads its blocks when it ends"
    if transfer.get_from_extra_config("bidirectional_kv_xfer", False):
        return f"{name} holds it: its blocks are kept for the next turn when it ends"
    return ""


def check_params(params: Any, *, tenant: bool) -> None:
    """Raises VLLMValidationError for what a call may not say to a connector. params: of sampling.

    tenant: whether it is of a fleet's client. An engine reads whichever blocks of another engine
    the call names, from whichever host: that is for the router that serves both engines, and a
    tenant would read prompts of others.
    """
    from vllm.exceptions import VLLMValidationError  # not where flags are read without vLLM

    given = (getattr(params, "extra_args", None) or {}).get(PARAMS)
    if given is None:
        return
    if tenant:
        raise VLLMValidationError(
            f"{PARAMS} must be left out: a fleet's clients name no blocks of other engines",
            parameter=PARAMS,
        )
    if not isinstance(given, dict):
        kind = type(given).__name__
        raise VLLMValidationError(f"{PARAMS} is a {kind}, must be an object", parameter=PARAMS)


def without_load(request: EngineCoreRequest) -> None:
    """Let no connector load the request's prompt: it has begun elsewhere.

    The engine that had the blocks has freed them since. Where vLLM itself preempts a request after
    its load, it computes the prompt, and so does an engine that the request comes to.
    """
    params = request.sampling_params
    extra = None if params is None else params.extra_args
    if params is None or not extra or not isinstance(given := extra.get(PARAMS), dict):
        return
    if given.get("do_remote_prefill"):
        params.extra_args = {**extra, PARAMS: {**given, "do_remote_prefill": False}}


class SideChannel:
    """The port at which NIXL answers for one engine of several on a host, held until `close`."""

    def __init__(self, first: int = FIRST_PORT) -> None:
        """Take the first port from `first` on that no other engine has. Raises StartupError."""
        for port in range(first, first + MOST_PORTS):
            self._held = socket.socket(socket.AF_UNIX)
            try:
                # A name without a file, which goes with the process. The port itself is bound by
                # vLLM, later, and at the same time as those of other engines.
                self._held.bind(f"\0kvmig-nixl-{port}")
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
            except OSError:
                self._held.close()
                continue
            self.port = port
            return
        raise StartupError(
            f"NIXL finds no free port from {first} to {first + MOST_PORTS - 1}: set {PORT}"
        )

    def close(self) -> None:
        """Give the port back."""
        self._held.close()


def open_side_channel(transfer: KVTransferConfig | None) -> SideChannel | None:
    """Give an engine with NIXL a port and an id of its own; None: it has another connector, or
    none. Raises StartupError."""
    if transfer is None or transfer.kv_connector not in NIXL:
        return None
    channel = SideChannel(int(os.environ.get(PORT, FIRST_PORT)))
    os.environ[PORT] = str(channel.port)
    transfer.engine_id = f"{transfer.engine_id}_{channel.port}"
    return channel
