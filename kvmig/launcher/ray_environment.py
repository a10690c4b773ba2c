"""The environment of what runs on the nodes of a Ray cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping

FORWARDED = (
    "KVMIG_ALLOW_",
    "VLLM_",
    "HF_",
    "TRANSFORMERS_",
    "TORCH_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "OMP_",
)
"""Variables of the user's that instances get on every node, by what their names start with."""
NOT_FORWARDED = (
    "VLLM_API_KEY",
    "VLLM_HOST_IP",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
)
RAYS_OWN = "RAY_"
THREADS = "OMP_NUM_THREADS"


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the launcher's environment that holds on every node."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED) and name not in NOT_FORWARDED
    }


def base_environment(given: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child of one of Ray's workers. given: `forwarded`. own: the worker's.

    Ray's own variables would make libraries in the child think that they run in the worker.
    """
    base = {name: value for name, value in own.items() if not name.startswith(RAYS_OWN)}
    # Ray's, of the CPUs that the actor takes; the user's own are among the forwarded ones.
    base.pop(THREADS, None)
    return base | dict(given)
