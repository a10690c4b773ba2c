"""Whether and where a model fits, before it starts. Pure; all sizes are bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec

from kvmig.core.model_sizes import LayerSizes, ModelSizes
from kvmig.fleet import device_room
from kvmig.fleet.capacity import HostCapacity
from kvmig.fleet.device_claims import DeviceClaim, KnownSizes
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed, Strategy
from kvmig.fleet.place_choice import choose_places
from kvmig.fleet.worker_nodes import InstanceNeed, WorkerNode, room_now


class HostVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory."""

    need_bytes: int
    total_bytes: int
    """What all models together may take."""
    free_bytes: int
    fits: bool


class DeviceVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU."""

    gpu: str
    uuid: str
    need_bytes: int
    total_bytes: int
    free_bytes: int
    others_bytes: int
    """Bytes of processes that are not the fleet's."""
    models: dict[str, int]
    """What models of the fleet claim."""
    fits: bool


class FitSuggestion(msgspec.Struct, frozen=True, kw_only=True):
    """A change after which the model fits, by an evaluation of its own."""

    flags: tuple[str, ...]
    """Flags to add after those of the specification."""
    gpus_per_instance: int = 0
    """What that field of the specification must be then; 0: left out, as it is."""
    max_tokens: int
    """The longest request, in tokens."""
    need_bytes: int
    """Bytes that an instance takes then: of each of its GPUs, or of the host."""


class FitVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model's size, and where it would start."""

    name: str
    fits: bool
    """Whether one instance could start now, without another model's end."""
    why: str
    """Why not; or, that it never could."""
    basis: str
    """Origin of the sizes on a GPU: measured, gpu_memory, flags or estimated; host: it uses
    none."""
    workers: int
    weights_bytes: int
    """Bytes of each worker's weights."""
    files_bytes: int
    """Bytes of the weights' files, by their headers."""
    kv_bytes: int
    """Bytes of the KV cache of each worker; 0: what is left."""
    rest_bytes: int
    """Bytes of everything else of each worker."""
    rest_basis: str = "assumed"
    """Origin of these: measured on a day with a model, or assumed."""
    token_bytes: int = 0
    """Bytes that each token adds to the KV cache of a worker; 0: not known."""
    request_bytes: int = 0
    """Bytes of one request of the model's whole length."""
    block_bytes: int = 0
    """Bytes of the KV cache that the engine gives no request: one of its blocks; 0: not known."""
    max_tokens: int = 0
    layers: tuple[LayerSizes, ...] = ()
    host: HostVerdict
    gpus: list[DeviceVerdict] = []
    place: list[str] = []
    """UUIDs of the GPUs that its first instance would get."""
    suggestions: tuple[FitSuggestion, ...] = ()
    """Changes after which it fits; empty where it fits as it is."""


def verdict(
    name: str,
    workers: int,
    host: HostVerdict,
    known: KnownSizes,
    host_kv: int,
    host_rest: tuple[int, str],
    claim: DeviceClaim | None,
    need: DeviceNeed | None,
    node: WorkerNode,
    strategy: Strategy = "spread",
) -> FitVerdict:
    """host_kv, host_rest: of each worker in the host's memory, the rest with its basis.

    node: with other models alone.
    """
    sizes = known.sizes or ModelSizes(weights=0, files=known.weights, tokens=0)
    rest, basis = host_rest if claim is None else (claim.rest, known.rest_basis)
    kv = host_kv if claim is None else claim.kv
    why = "" if host.fits else _host_reason(host)
    why = why or _cache_reason(kv, sizes)
    found = FitVerdict(
        name=name,
        fits=not why,
        why=why,
        basis="host" if claim is None else claim.basis,
        workers=workers,
        weights_bytes=sizes.weights or known.weights // workers,
        files_bytes=sizes.files,
        kv_bytes=kv,
        rest_bytes=rest,
        rest_basis=basis,
        token_bytes=sizes.token,
        request_bytes=sizes.request,
        block_bytes=sizes.reserved,
        max_tokens=sizes.tokens,
        layers=sizes.layers,
        host=host,
    )
    if need is None:
        return found
    devices = node.devices
    rows = [_row(one, need) for one in devices]
    rooms = {node.name: room_now(node, host.free_bytes)}
    places = choose_places(rooms, InstanceNeed(name, 0, (need,)), 1, strategy)
    if wrong := device_room.too_large(f"model {name}", need, devices):
        return msgspec.structs.replace(found, fits=False, why=wrong, gpus=rows)
    if places is None:
        why = "; ".join(device_room.reasons(need, devices))
        return msgspec.structs.replace(found, fits=False, why=found.why or why, gpus=rows)
    return msgspec.structs.replace(found, gpus=rows, place=list(places[0].gpus))


def _host_reason(host: HostVerdict) -> str:
    return f"the host: needs {host.need_bytes} bytes, {host.free_bytes} are free"


def _cache_reason(kv: int, sizes: ModelSizes) -> str:
    """Why the engine would refuse the KV cache; empty: it has room for one request."""
    need = sizes.request + sizes.reserved if sizes.request else 0
    if not kv or need <= kv:
        return ""
    own = " with the block that its engine keeps for itself" if sizes.reserved else ""
    return (
        f"a KV cache of {kv} bytes has no room for a request of {sizes.tokens} tokens, which takes"
        f" {need} bytes{own}"
    )


def _row(one: DeviceMemory, need: DeviceNeed) -> DeviceVerdict:
    return DeviceVerdict(
        gpu=one.title,
        uuid=one.id,
        need_bytes=need.each,
        total_bytes=one.total,
        free_bytes=one.free,
        others_bytes=one.others,
        models=dict(one.claims),
        fits=need.allows(one.id) and one.free >= need.each,
    )


def on_host(need: int, host: HostCapacity, free: int) -> HostVerdict:
    """The host's part. free: bytes that the next model may take."""
    return HostVerdict(need_bytes=need, total_bytes=host.total, free_bytes=free, fits=need <= free)


def without(names: Collection[str], devices: Sequence[DeviceMemory]) -> list[DeviceMemory]:
    """The GPUs as they would be if these deployments didn't run."""
    return [
        replace(one, claims={key: size for key, size in one.claims.items() if key not in names})
        for one in devices
    ]
